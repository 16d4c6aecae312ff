//! Orders over datasets, as pure functions: no I/O, no array of rows.
