//! Real servers for tests: started on a free port of 127.0.0.1, and stopped when dropped or when
//! the test process ends.
//!
//! `let s3 = VersityGw::start().await; let config = s3.bucket("data").await;`.
//! `tests/servers/install.sh` installs them; if a server is missing or does not start, the test
//! panics and says what to do, because a test that did not run must not pass.

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
