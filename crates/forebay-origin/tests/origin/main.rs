//! Origins: real servers, recorded ones, and faults.

mod conformance;
mod credentials;
mod credentials_canary;
mod hedging;
mod seams;
mod services;
mod wrappers;
