//! Trying again what may pass: an origin that cannot be reached for a moment.

use forebay_core::ErrorKind;
use std::time::Duration;

/// Evaluates an expression of `Result` until it succeeds, fails for good, or has been tried `$most`
/// times. (A macro, since the expression may borrow what it fills.)
macro_rules! attempts {
    ($most:expr, $attempt:expr) => {{
        let (most, mut made) = ($most, 1);
        loop {
            match $attempt {
                Err(e) if made < most && $crate::rows::attempts::may_pass(e.kind()) => {
                    $crate::rows::attempts::pause(made).await;
                    made += 1;
                }
                done => break done,
            }
        }
    }};
}
pub(super) use attempts;

pub(super) fn may_pass(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Timeout | ErrorKind::OriginUnavailable)
}

pub(super) async fn pause(made: u32) {
    tokio::time::sleep(Duration::from_millis(20 << made.min(6))).await;
}
