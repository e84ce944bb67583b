//! What a caller tells the store about pages: hints, and the ends of pins.

use larder_engine::{Class, Hint};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The end of a pin, in seconds since 1970.
pub(super) fn pin_end(until: f64) -> PyResult<u32> {
    if until.is_nan() || until < 1.0 {
        return Err(PyValueError::new_err("until is in seconds since 1970"));
    }
    // The cast saturates: a later end is the last one there is.
    Ok(until as u32)
}

/// A `larder_kv.store.Hint`: class, priority, session.
pub(super) type HintFields = (u8, u8, Option<Vec<u8>>);

/// The hint of a call; the empty one without fields.
pub(super) fn hinted(fields: Option<HintFields>) -> PyResult<Hint> {
    let Some((number, priority, session)) = fields else {
        return Ok(Hint::default());
    };
    let wrong = || PyValueError::new_err(format!("`hint`: class {number} is not below 64"));
    let hint = Hint::new(Class::new(number).ok_or_else(wrong)?).priority(priority);
    Ok(session.map_or(hint, |name| hint.session(&name)))
}
