//! The read path over origins and disks that fail.

mod archives;
mod bad_disk;
mod handover;
mod model;
mod read_path;
