//! The store: its model, its disks and their faults.

mod basic;
mod common;
mod faults;
mod follow;
mod incompatible;
mod kill;
mod model;
mod room;
mod threads;
mod walk;
