//! What the figures of a run mean: warnings, each with advice.

use crate::figures::{Figures, Quality, Report, Warning};

/// Below this utilization, MLPerf Storage does not count an accelerator as fed (most workloads).
const AU_GOOD: f64 = 0.9;
/// Waiting less than this is not worth a line.
const WAITED_LEAST: f64 = 0.05;
/// A cause is named from this share of the time on.
const CAUSE_LEAST: f64 = 0.02;
/// The place of the network among the causes.
const ON_THE_WAY: usize = 3;
/// An epoch after others whose bytes came from the origin by more than this.
const MISSED: f64 = 0.1;

/// Warnings for what the report says.
pub fn advise(report: &Report) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let mut warn = |what: String, advice: &str| {
        warnings.push(Warning {
            what,
            advice: advice.into(),
        });
    };
    if let Some(run) = &report.run {
        waiting(run, report, &mut warn);
        if run.skipped > 0 {
            warn(
                format!(
                    "{} {} could not be made and were left out",
                    forebay_core::units::grouped(run.skipped),
                    report.unit()
                ),
                "the log names them; on_error=\"raise\" stops at the first",
            );
        }
        if run.reconnects > 0 {
            warn(
                format!("{} connections to the node were lost", run.reconnects),
                "look at the node's log: it was restarted, or the network in between fails",
            );
        }
    }
    // What a job that was resumed reads first, nobody could have kept: neither its first epoch, of
    // whatever number, nor the one after a part of an epoch. (Packs, and rows of bounded batches, are
    // not as many in each epoch.)
    let mut before = 0;
    for epoch in &report.epochs {
        let samples = epoch.figures.samples;
        let is_later = report.epochs_left_out > 0 || before > 0 && before >= samples / 10 * 9;
        before += samples;
        let hit = epoch.figures.hit_ratio.filter(|hit| *hit < 1.0 - MISSED);
        if let (true, Some(hit)) = (is_later, hit) {
            warn(
                format!(
                    "in epoch {}, {:.0} % of the bytes came from the origin",
                    epoch.epoch,
                    (1.0 - hit) * 100.0
                ),
                "unless the node had not read them before (rows of a mix, or of another rank), the \
                 cache does not hold the dataset: make it larger, pin the dataset, or read fewer \
                 columns",
            );
            break;
        }
    }
    if let Some(quality) = &report.shuffle {
        shuffled(quality, report, &mut warn);
    }
    if let Some(money) = &report.money
        && money.spent_total > money.saved_total
        && report.epochs.len() > 1
        && money.spent_total > 0.0
    {
        warn(
            "the origin cost more than the cache saved, over several epochs".into(),
            "see the bytes by source: what is read from the origin in every epoch costs each time",
        );
    }
    warnings
}

/// Whether the loop took packs: what is decoded are documents then, and no user's function puts
/// batches together.
fn is_of_packs(report: &Report) -> bool {
    report.unit() == "packs"
}

/// Whether the order is known, and goes from block to block anyway.
fn is_by_block(report: &Report) -> bool {
    let order = report.shuffle.as_ref().map(|quality| &*quality.order);
    order.is_some_and(|order| order == "none" || order.starts_with("block"))
}

fn waiting(run: &Figures, report: &Report, warn: &mut impl FnMut(String, &str)) {
    let seconds = run.seconds;
    if seconds <= 0.0 {
        return;
    }
    let share = |s: f64| s / seconds;
    let starts = share(run.first_wait_s);
    if starts > 0.2 && run.first_wait_s > 5.0 {
        warn(
            format!(
                "{:.0} % of the time was spent waiting for the first batches",
                starts * 100.0
            ),
            "warm the first shards (`forebay warm`), or use open_shards(), so that the first rows \
             come before the index is complete",
        );
    }
    if share(run.waited_s) < WAITED_LEAST || run.au.is_some_and(|au| au >= AU_GOOD) {
        return;
    }
    let of_node = run.waits.of_node();
    let packs = is_of_packs(report);
    let (on_the_way, decoding, collating) = match packs {
        // The wait for the rows of packs ends when these are tokenized.
        true => (
            "for the network between node and loop, or for tokenizing",
            "for decoding here",
            "for putting packs together",
        ),
        false => (
            "for the network between node and loop",
            "for decoding here",
            "for collating",
        ),
    };
    let causes = [
        ("for the origin", of_node[0]),
        ("for the node's disk", of_node[1]),
        ("for the node to decode and frame", of_node[2]),
        (on_the_way, of_node[3]),
        (decoding, run.waits.decode_s),
        (collating, run.waits.collate_s),
    ];
    let advice = [
        match report.is_streamed {
            true => {
                "warm the dataset first (`forebay warm`), raise window_bytes=, or make the cache \
                     large enough for it"
            }
            false => {
                "warm the dataset first (`forebay warm`), raise prefetch=, or make the cache \
                      large enough for it"
            }
        },
        "put the cache on a faster disk, or on several (a --cache for each)",
        // Packs are made of one column.
        match (packs, is_by_block(report)) {
            (true, true) => "give the node more cores",
            (true, false) => {
                "shuffle by forebay.Block(…) so that blocks are decoded once, or give the node more \
                 cores"
            }
            (false, true) => "read fewer columns, or give the node more cores",
            (false, false) => {
                "read fewer columns, shuffle by forebay.Block(…) so that blocks are decoded once, \
                 or give the node more cores"
            }
        },
        match (report.is_streamed, report.is_local) {
            (true, true) => "raise window_bytes= and connections=",
            (false, true) => "raise prefetch=, or give stream=True",
            (true, false) => {
                "raise window_bytes= and connections=, or run a node beside the training process (its \
                     Unix socket is used)"
            }
            (false, false) => {
                "raise prefetch=, run a node beside the training process (its Unix socket is \
                      used), or stream=True"
            }
        },
        match packs {
            true => "raise threads=, or store tokens in place of texts",
            false => {
                "raise threads=, or make decode= and transform= cheaper: they run in this process"
            }
        },
        match packs {
            true => "take fewer packs in a batch, or make collate= cheaper",
            false => {
                "read fewer columns, make collate= cheaper, or let output=\"torch\" put batches together"
            }
        },
    ];
    let mut named: Vec<usize> = (0..causes.len())
        .filter(|&i| share(causes[i].1) >= CAUSE_LEAST)
        .collect();
    named.sort_by(|&a, &b| causes[b].1.total_cmp(&causes[a].1));
    let Some(&worst) = named.first() else { return };
    let list: Vec<String> = named
        .iter()
        .map(|&i| format!("{:.0} % {}", share(causes[i].1) * 100.0, causes[i].0))
        .collect();
    let mut told = advice[worst].to_owned();
    if packs && worst == ON_THE_WAY {
        told += "; if tokenizing is what takes the time (decode_s of loader.stats()), raise threads=, \
                 or store tokens in place of texts";
    }
    warn(
        format!(
            "the loop waited {:.0} % of the time: {}",
            share(run.waited_s) * 100.0,
            list.join(", ")
        ),
        &told,
    );
}

fn shuffled(quality: &Quality, report: &Report, warn: &mut impl FnMut(String, &str)) {
    let of = |name: &str| {
        let found = quality.measures.iter().find(|(n, ..)| n == name);
        found.map(|(_, value, uniform)| (*value, *uniform))
    };
    if quality.order == "none" {
        return;
    }
    if let Some((dispersion, _)) = of("label dispersion").filter(|(d, _)| *d > 2.0) {
        // Nobody knows how many rows a batch of packs has.
        let what = match (is_of_packs(report), quality.batch) {
            (false, _) => "batches differ".into(),
            (true, 0) => "stretches of the order differ".into(),
            (true, rows) => format!("stretches of {rows} rows of the order differ"),
        };
        warn(
            format!(
                "{what} {dispersion:.1} times as much from each other as fair samples do (shuffle \
                 {})",
                quality.order
            ),
            "shuffle more blocks together: forebay.Block(n) with a larger n, or forebay.Full()",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::{Epoch, Waits};

    fn run() -> Report {
        Report {
            run: Some(Figures {
                samples: 1000,
                seconds: 100.0,
                compute_s: 60.0,
                waited_s: 40.0,
                au: Some(0.6),
                waits: Waits {
                    node_s: 35.0,
                    decode_s: 4.0,
                    collate_s: 1.0,
                    origin_s: 60.0,
                    disk_s: 5.0,
                    prepare_s: 5.0,
                    network_s: 0.0,
                },
                ..Figures::default()
            }),
            ..Report::default()
        }
    }

    #[test]
    fn a_wait_is_told_with_its_causes_and_the_advice_is_for_the_worst() {
        let warnings = advise(&run());
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert_eq!(
            warnings[0].what,
            "the loop waited 40 % of the time: 30 % for the origin, 4 % for decoding here, 2 % for \
             the node's disk, 2 % for the node to decode and frame"
        );
        assert!(warnings[0].advice.contains("forebay warm"), "{warnings:?}");

        let mut decoding = run();
        let waits = &mut decoding.run.as_mut().unwrap().waits;
        (waits.node_s, waits.decode_s) = (1.0, 38.0);
        assert!(advise(&decoding)[0].advice.contains("threads="));

        let mut far = run();
        let waits = &mut far.run.as_mut().unwrap().waits;
        (waits.origin_s, waits.network_s) = (0.0, 60.0);
        assert!(advise(&far)[0].advice.contains("stream=True"));
        assert!(
            advise(&far)[0]
                .advice
                .contains("beside the training process")
        );
        far.is_local = true;
        let near = &advise(&far)[0].advice;
        assert!(near.contains("stream=True") && !near.contains("beside"));
        far.is_streamed = true;
        let advice = &advise(&far)[0].advice;
        assert!(advice.contains("connections=") && !advice.contains("stream=True"));
    }

    #[test]
    fn who_reads_whole_blocks_is_not_told_to() {
        let mut decoding = run();
        let waits = &mut decoding.run.as_mut().unwrap().waits;
        (waits.origin_s, waits.prepare_s) = (0.0, 60.0);
        for (order, told) in [
            (None, true),
            (Some("full"), true),
            (Some("window:100"), true),
            (Some("block:16"), false),
            (Some("none"), false),
        ] {
            decoding.shuffle = order.map(|order| Quality {
                order: order.into(),
                ..Quality::default()
            });
            let advice = &advise(&decoding)[0].advice;
            assert!(advice.contains("more cores"), "{advice}");
            assert_eq!(
                advice.contains("forebay.Block"),
                told,
                "{order:?}: {advice}"
            );
        }
    }

    #[test]
    fn advice_for_packs_is_of_packs() {
        let mut packs = run();
        packs.unit = "packs".into();
        let figures = packs.run.as_mut().unwrap();
        figures.skipped = 3;
        (figures.waits.node_s, figures.waits.decode_s) = (1.0, 38.0);
        packs.shuffle = Some(Quality {
            order: "block:2".into(),
            batch: 32,
            measures: vec![("label dispersion".into(), 3.0, 1.0)],
            ..Quality::default()
        });
        let told = advise(&packs);
        let all: String = told.iter().flat_map(|w| [&*w.what, &*w.advice]).collect();
        for wrong in [
            "samples could",
            "decode=",
            "for collating",
            "batches differ",
        ] {
            assert!(!all.contains(wrong), "{wrong} in {told:?}");
        }
        for right in [
            "3 packs could",
            "store tokens",
            "stretches of 32 rows of the order differ 3.0",
        ] {
            assert!(all.contains(right), "{right} in {told:?}");
        }
        let waits = &mut packs.run.as_mut().unwrap().waits;
        *waits = Waits {
            node_s: 38.0,
            prepare_s: 1.0,
            ..Waits::default()
        };
        assert!(!advise(&packs)[0].advice.contains("columns"));
        let waits = &mut packs.run.as_mut().unwrap().waits;
        (waits.prepare_s, waits.network_s) = (0.0, 1.0);
        let told = advise(&packs);
        assert!(told[0].what.contains("or for tokenizing") && told[0].advice.contains("decode_s"));
        packs.unit = String::new();
        let told = advise(&packs);
        assert!(told.iter().any(|w| w.what.starts_with("3 samples could")));
        assert!(
            told.iter()
                .any(|w| w.what.starts_with("batches differ 3.0"))
        );
    }

    #[test]
    fn a_run_that_is_fed_has_no_warnings() {
        let mut fed = run();
        let figures = fed.run.as_mut().unwrap();
        (figures.au, figures.waited_s) = (Some(0.97), 3.0);
        assert_eq!(advise(&fed), []);
        assert_eq!(advise(&Report::default()), []);
    }

    #[test]
    fn bytes_that_come_from_the_origin_again_are_told_once() {
        let epoch = |epoch, hit| Epoch {
            epoch,
            figures: Figures {
                samples: if epoch == 3 { 60 } else { 100 },
                hit_ratio: Some(hit),
                ..Figures::default()
            },
        };
        let report = Report {
            epochs: vec![epoch(0, 0.0), epoch(1, 0.4), epoch(2, 0.4)],
            ..Report::default()
        };
        let warnings = advise(&report);
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].what.starts_with("in epoch 1, 60 %"));
        let warm = Report {
            epochs: vec![epoch(0, 0.0), epoch(1, 1.0)],
            ..Report::default()
        };
        assert_eq!(advise(&warm), []);
        // Of packs, there may be some more in the second epoch.
        let mut packs = Report {
            epochs: vec![epoch(0, 0.0), epoch(1, 0.6)],
            ..Report::default()
        };
        packs.epochs[1].figures.samples += 5;
        assert!(advise(&packs)[0].what.starts_with("in epoch 1, 40 %"));
        // Resumed within epoch 3, at a node that had read nothing.
        let mut resumed = Report {
            epochs: vec![epoch(3, 0.0), epoch(4, 0.6)],
            ..Report::default()
        };
        assert_eq!(advise(&resumed), []);
        resumed.epochs.push(epoch(5, 0.6));
        assert!(advise(&resumed)[0].what.starts_with("in epoch 5, 40 %"));
        resumed.epochs.truncate(1);
        resumed.epochs_left_out = 1;
        assert!(advise(&resumed)[0].what.starts_with("in epoch 3, 100 %"));
    }
}
