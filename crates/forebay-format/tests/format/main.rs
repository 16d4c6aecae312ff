//! The formats of archives and rows, beside other programs and against hostile bytes.

mod common;
mod fuzz;
#[path = "../../../../tests/fuzz/harness.rs"]
mod harness;
mod hostile;
mod read;
mod rows;
mod rows_common;
mod rows_fuzz;
mod rows_hostile;
mod write;
