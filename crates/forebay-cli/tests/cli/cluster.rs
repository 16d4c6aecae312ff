//! `forebay cluster plan`: the design's bounds on spread and moves, as the command prints them; and
//! `forebay cluster map`.

use crate::support::forebay;

#[test]
fn a_plan_moves_hardly_more_than_it_has_to() {
    for (change, least) in [
        (["--add", "8"], 8.0 / 72.0),
        (["--remove", "4"], 4.0 / 64.0),
    ] {
        let mut args = vec!["--json", "cluster", "plan", "--nodes", "64"];
        args.extend(["--zones", "3", "--capacity", "1TiB", "--rate", "1GiB"]);
        args.extend(change);
        let plan = forebay(&args).ok().json();
        let number = |name: &str| plan[name].as_f64().unwrap_or_else(|| panic!("{plan:#}"));
        assert!(number("max_over_mean") <= 1.10, "{plan:#}");
        assert!((number("least") - least).abs() < 1e-9, "{plan:#}");
        assert!(number("moved") <= 1.05 * number("least"), "{plan:#}");
        assert_eq!(number("between_others"), 0.0);
        assert!(number("seconds") > 0.0);
    }
    let still = forebay(&["--json", "cluster", "plan", "--nodes", "3"]).ok();
    assert!(still.json().get("moved").is_none());
}

#[test]
fn a_plan_says_what_it_takes() {
    let run = forebay(&["cluster", "plan", "--nodes", "64", "--add", "8"]).ok();
    for part in ["of the mean", "must; between other nodes 0.00 %", "minutes"] {
        assert!(run.out.contains(part), "{}", run.out);
    }
}

#[test]
fn a_map_is_followed_by_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("map.json");
    let (a, b) = ("a=10.0.0.1:8300,2TiB", "b=host:8300,1TiB,rack-2");
    let first = forebay(&["cluster", "map", "training", "--member", a, "--member", b]).ok();
    let map = first.json();
    assert_eq!(
        (&map["cluster"], &map["epoch"]),
        (&"training".into(), &1.into())
    );
    assert_eq!(map["members"].as_array().unwrap().len(), 2);
    std::fs::write(&file, &first.out).unwrap();
    let after = file.to_str().unwrap();
    let next = forebay(&[
        "cluster", "map", "training", "--after", after, "--member", b,
    ])
    .ok();
    let next = next.json();
    assert_eq!((&next["epoch"], &next["seed"]), (&2.into(), &map["seed"]));
    assert_eq!(next["members"][0]["address"], "host:8300");
    assert_eq!(next["members"][0]["zone"], "rack-2");
}
