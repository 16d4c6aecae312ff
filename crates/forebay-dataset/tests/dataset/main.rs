//! Datasets over directories whose requests are counted and can be made to fail.

mod composed;
mod crowded;
mod evolving;
mod filter;
mod follow;
mod keys;
mod laid;
mod opening;
mod rows;
mod soon;
mod support;
