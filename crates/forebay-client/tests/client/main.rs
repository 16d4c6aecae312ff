//! The client of a node, against small nodes of frames and sockets.

mod archive;
mod client;
mod common;
mod nodes;
mod stream;
