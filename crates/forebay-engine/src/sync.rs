//! The lock and the atomics of the code whose schedules are explored: the standard ones; in the
//! unit tests of this crate shuttle's, which runs their threads in one order after another.

#[cfg(not(test))]
pub(crate) use forebay_core::sync::Mutex;
#[cfg(not(test))]
pub(crate) use std::sync::atomic;

#[cfg(test)]
pub(crate) use explored::{Mutex, explore};
#[cfg(test)]
pub(crate) use shuttle::sync::atomic;

#[cfg(test)]
mod explored {
    use shuttle::{Config, Runner, scheduler::RandomScheduler, sync::MutexGuard};

    #[derive(Default)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().expect("no thread failed with the lock")
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }

    /// Runs `test` in many schedules; a failing one is printed together with what replays it.
    /// `FOREBAY_TEST_CASES=<factor>` multiplies their number.
    pub(crate) fn explore(schedules: usize, test: impl Fn() + Send + Sync + 'static) {
        let factor: usize = std::env::var("FOREBAY_TEST_CASES")
            .map_or(1, |n| n.parse().expect("FOREBAY_TEST_CASES is a number"));
        let scheduler = match std::env::var("FOREBAY_TEST_SEED") {
            Ok(seed) => RandomScheduler::new_from_seed(
                seed.parse().expect("FOREBAY_TEST_SEED is a number"),
                schedules * factor,
            ),
            Err(_) => RandomScheduler::new(schedules * factor),
        };
        let mut config = Config::new();
        config.stack_size = 256 << 10;
        config.silence_warnings = true;
        Runner::new(scheduler, config).run(test);
    }
}
