//! How a receiver reaches a node: whoever uses this crate brings the sockets, TLS and keys.

use forebay_core::Result;
use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};

/// A connection, whatever it is made of.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// A node.
pub trait Dial: Send + Sync {
    /// A new connection to it.
    fn dial(&self) -> BoxFuture<'_, Result<Box<dyn Io>>>;

    /// For people: its URL.
    fn name(&self) -> String;

    /// `Host`, and what else each request needs.
    fn headers(&self) -> Vec<(String, String)>;
}
