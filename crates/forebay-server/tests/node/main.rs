//! A node in this process, over directories, as its clients see it.

mod aistore;
mod appends;
mod browsers;
mod cluster;
mod common;
mod lifecycle;
mod origin;
mod s3;
mod uploads;
mod v1;
