//! A binary logarithm in integers: that of the C library differs from platform to platform in the
//! last bits, and nodes would place some units differently.

/// Fractional bits of the result.
pub(crate) const FRACTION_BITS: u32 = 40;
const STEPS_BITS: u32 = 11;
const STEPS: usize = 1 << STEPS_BITS;

/// log2(1 + i / STEPS), with [`FRACTION_BITS`] fractional bits.
static TABLE: [u64; STEPS + 1] = table();

const fn table() -> [u64; STEPS + 1] {
    let mut table = [0; STEPS + 1];
    let mut i = 0;
    while i < STEPS {
        table[i] = log2_of_mantissa((1u128 << 63) + ((i as u128) << (63 - STEPS_BITS)));
        i += 1;
    }
    table[STEPS] = 1 << FRACTION_BITS;
    table
}

/// log2 of a number from 1 to 2 with 63 fractional bits, bit by bit: squaring doubles a logarithm.
const fn log2_of_mantissa(mut x: u128) -> u64 {
    let (mut result, mut bit) = (0, 0);
    while bit < FRACTION_BITS {
        x = (x * x) >> 63;
        result <<= 1;
        if x >= 1 << 64 {
            x >>= 1;
            result |= 1;
        }
        bit += 1;
    }
    result
}

/// `-log2((x + 1) / 2^64)` with [`FRACTION_BITS`] fractional bits, to a few millionths of a bit: how
/// many bits a uniform number is below the greatest. Never negative.
pub(crate) fn bits_below(x: u64) -> u64 {
    // 2^64 itself has no place in 64 bits.
    let Some(x) = x.checked_add(1) else {
        return 0;
    };
    let zeros = x.leading_zeros();
    // The mantissa without its first bit, as a fraction of 2^63.
    let fraction = (x << zeros) & (u64::MAX >> 1);
    let step = (fraction >> (63 - STEPS_BITS)) as usize;
    let within = fraction & ((1 << (63 - STEPS_BITS)) - 1);
    let (low, high) = (TABLE[step], TABLE[step + 1]);
    let between = ((u128::from(high - low) * u128::from(within)) >> (63 - STEPS_BITS)) as u64;
    (u64::from(zeros + 1) << FRACTION_BITS) - (low + between)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_logarithm() {
        let mut x = 1u64;
        for i in 0..200_000u64 {
            x = x
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(i | 1);
            let x = x >> (i % 64);
            let exact = 64.0 - (x as f64 + 1.0).log2();
            let ours = bits_below(x) as f64 / (1u64 << FRACTION_BITS) as f64;
            assert!((ours - exact).abs() < 1e-6, "{x}: {ours} and {exact}");
        }
    }

    #[test]
    fn it_has_the_same_bits_everywhere() {
        let golden = [
            (0, 64 << FRACTION_BITS),
            (1, 63 << FRACTION_BITS),
            (u64::MAX, 0),
            ((1 << 63) - 1, 1 << FRACTION_BITS),
            (0x0123_4567_89ab_cdef, GOLDEN[0]),
            (0xfedc_ba98_7654_3210, GOLDEN[1]),
        ];
        for (x, bits) in golden {
            assert_eq!(bits_below(x), bits, "{x:#x}");
        }
    }

    const GOLDEN: [u64; 2] = [8_591_343_297_141, 7_065_765_423];

    #[test]
    fn it_falls_as_numbers_grow() {
        let mut last = u64::MAX;
        for i in 0..=u64::from(u16::MAX) {
            let bits = bits_below(i << 48 | 0xffff_ffff_ffff);
            assert!(bits <= last);
            last = bits;
        }
    }
}
