//! Names from outside, for a terminal and for a page.

/// A name on one line: control characters and marks that turn the direction of writing, which would
/// change the text beside it, are replaced.
pub fn shown(name: &str) -> String {
    let replaced = |letter: char| match letter {
        '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' => '\u{fffd}',
        '\u{61c}' | '\u{feff}' => '\u{fffd}',
        _ if letter.is_control() => '\u{fffd}',
        _ => letter,
    };
    name.chars().map(replaced).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stays_on_its_line_and_in_its_direction() {
        assert_eq!(
            shown("a\u{1b}[2J\nb\u{202e}c"),
            "a\u{fffd}[2J\u{fffd}b\u{fffd}c"
        );
        assert_eq!(shown("<b> מודל 模型"), "<b> מודל 模型");
    }
}
