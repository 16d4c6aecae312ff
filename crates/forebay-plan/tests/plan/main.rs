//! Plans: orders, packs and mixes, and where they go on.

mod common;
mod golden;
mod orders;
mod pack;
mod quality;
mod randomness;
mod resume;
mod shape;
