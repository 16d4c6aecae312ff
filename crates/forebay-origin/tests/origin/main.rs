//! Origins: real servers, recorded ones, and faults.

mod conformance;
mod credentials;
mod hedging;
mod seams;
mod services;
mod wrappers;
