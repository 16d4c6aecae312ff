//! Real servers for tests: started on a free port of 127.0.0.1, stopped when dropped, and gone when
//! the test process is.
//!
//! `let s3 = VersityGw::start().await; let config = s3.bucket("data").await;`. They are installed by
//! `tests/servers/install.sh`; a server that is missing or does not start panics with what to do,
//! because a test that did not run must not pass.

mod azurite;
mod fake_gcs;
mod nginx;
mod process;
mod request;
mod versitygw;

pub use azurite::Azurite;
pub use fake_gcs::FakeGcs;
pub use nginx::Nginx;
pub use process::Server;
pub use versitygw::VersityGw;
