//! Prompts and their tokens.

use super::Cache;
use super::agree::Call;
use crate::core::Request;
use crate::prompt::{Prompt, Scope, VocabularyFull};

impl Cache {
    /// A prompt with this scope and these tokens.
    ///
    /// # Errors
    /// The vocabulary is full.
    pub fn prompt(
        &mut self,
        scope: &Scope,
        tokens: impl IntoIterator<Item = u64>,
    ) -> Result<Prompt, VocabularyFull> {
        let mut prompt = self.core.prompt(scope);
        self.add_tokens(&mut prompt, tokens)?;
        Ok(prompt)
    }

    fn add_tokens(
        &mut self,
        prompt: &mut Prompt,
        tokens: impl IntoIterator<Item = u64>,
    ) -> Result<(), VocabularyFull> {
        if !self.agreed.has_ranks() {
            return self.core.extend_prompt(prompt, tokens);
        }
        let tokens: Vec<u64> = tokens.into_iter().collect();
        self.agreed.called(Call::Tokens, tokens.iter().copied());
        self.core.extend_prompt(prompt, tokens)
    }

    /// Adds tokens to a prompt. If the vocabulary is full, the prompt ends there: the tokens behind
    /// are not cached.
    pub(crate) fn extend_or_cut(&mut self, prompt: &mut Prompt, tokens: &[u64]) {
        if let Err(error) = self.add_tokens(prompt, tokens.iter().copied()) {
            // runbook: have been numbered, which is the maximum
            tracing::warn!("{error}");
        }
    }

    /// Adds tokens to the prompt of a request as the answer is generated. Each token needs a slot,
    /// too: see [`Cache::extend`].
    ///
    /// # Errors
    /// The vocabulary is full: the prompt is cached up to there.
    pub fn extend_prompt(
        &mut self,
        request: &mut Request,
        tokens: impl IntoIterator<Item = u64>,
    ) -> Result<(), VocabularyFull> {
        self.add_tokens(request.prompt_mut(), tokens)
    }
}
