//! Memory that grows while a block is decoded, because nobody knows in advance how much it will
//! take.

use forebay_core::Reservation;

/// Reservations for one purpose, taken one after another.
#[derive(Debug, Default)]
pub(super) struct Grown {
    /// Bytes, and what holds them: reservations from one budget, or from several.
    steps: Vec<(u64, Vec<Reservation>)>,
    bytes: u64,
}

impl Grown {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn add(&mut self, bytes: u64, held: Vec<Reservation>) {
        self.steps.push((bytes, held));
        self.bytes += bytes;
    }

    /// Keeps `bytes` and gives back the rest.
    pub fn shrink(&mut self, bytes: u64) {
        while self.bytes > bytes
            && let Some((last, mut held)) = self.steps.pop()
        {
            self.bytes -= last;
            if self.bytes < bytes {
                let left = bytes - self.bytes;
                held.iter_mut().for_each(|held| held.shrink(left));
                self.add(left, held);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::MemoryBudget;

    #[test]
    fn what_is_too_much_is_given_back_the_last_first() {
        let budget = MemoryBudget::new(64 << 10);
        let mut grown = Grown::default();
        for bytes in [4 << 10, 8 << 10, 2 << 10] {
            grown.add(bytes, vec![budget.try_hold(bytes).unwrap()]);
        }
        grown.shrink(20 << 10);
        assert_eq!((grown.bytes(), budget.used_bytes()), (14 << 10, 14 << 10));
        grown.shrink(5 << 10);
        assert_eq!((grown.bytes(), budget.used_bytes()), (5 << 10, 5 << 10));
        grown.shrink(0);
        assert_eq!((grown.bytes(), budget.used_bytes()), (0, 0));
    }
}
