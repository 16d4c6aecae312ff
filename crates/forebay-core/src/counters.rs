//! Counters of one part of the program, declared once: what is counted, and what it means.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Adds to a counter, which orders no other memory.
pub fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Relaxed);
}

/// Declares a struct of live counters, and one of their values at a moment. Fields under `asked`
/// are in the second alone: gauges, which are read from their owners.
///
/// ```
/// forebay_core::counters! {
///     DoorStats => DoorSnapshot {
///         /// Times that it was opened.
///         opened,
///     }
///     asked {
///         /// Whether it is open now.
///         open,
///     }
/// }
/// let stats = DoorStats::default();
/// forebay_core::counters::add(&stats.opened, 1);
/// assert_eq!(stats.snapshot(), DoorSnapshot { opened: 1, open: 0 });
/// ```
#[macro_export]
macro_rules! counters {
    (
        $stats:ident => $snapshot:ident { $($(#[$doc:meta])* $name:ident),* $(,)? }
        $(asked { $($(#[$gauge_doc:meta])* $gauge:ident),* $(,)? })?
    ) => {
        /// Live counters.
        #[derive(Debug, Default)]
        pub struct $stats {
            $($(#[$doc])* pub $name: ::std::sync::atomic::AtomicU64,)*
        }

        /// Their values at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $snapshot {
            $($(#[$doc])* pub $name: u64,)*
            $($($(#[$gauge_doc])* pub $gauge: u64,)*)?
        }

        impl $stats {
            /// The counters now; the fields under `asked` are 0.
            pub fn snapshot(&self) -> $snapshot {
                $snapshot {
                    $($name: self.$name.load(::std::sync::atomic::Ordering::Relaxed),)*
                    $($($gauge: 0,)*)?
                }
            }
        }
    };
}
