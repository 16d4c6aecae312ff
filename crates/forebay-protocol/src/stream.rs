//! What a receiver sends when it opens a connection of a stream.

use forebay_core::{Error, Result, limits};
use forebay_plan::{Partition, PlanDocument, State};
use serde::{Deserialize, Serialize};

/// The body of the request: the same for all connections of a stream, and for those that continue
/// them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamRequest {
    /// The datasets, by their ids, and the order.
    pub plan: PlanDocument,
    /// The rank that receives, and how its batches are made.
    pub partition: Partition,
    /// Where the job begins; steps are counted from here. Without it, from the beginning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<State>,
    /// The epoch before which the stream ends; without it, the stream has no end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until_epoch: Option<u64>,
    /// The columns; without it, all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<Vec<String>>,
    /// The lengths of the rows of each source, for batches that are bounded by length: the ids that
    /// the node gave them ([`crate::composition`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lengths: Option<Vec<String>>,
    /// How much the node prepares for one connection beyond what it has sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window_bytes: Option<u64>,
}

impl StreamRequest {
    /// # Errors
    /// `Invalid`, saying where the JSON is wrong.
    pub fn parse(json: &[u8]) -> Result<Self> {
        let request: Self = serde_json::from_slice(json).map_err(|e| {
            Error::invalid(format!("this does not describe a stream: {e}"))
                .hint("plan, partition, state, until_epoch, columns, lengths, window_bytes")
        })?;
        let most = limits::STREAM_WINDOW_MAX_BYTES;
        match request.window_bytes {
            Some(window) if window > most => {
                Err(Error::invalid(format!("window_bytes is {window}"))
                    .hint(format!("give at most {most}")))
            }
            _ => Ok(request),
        }
    }
}

/// Which steps one connection gets: the query of its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Which of the stream's connections this is, from 0.
    pub connection: u32,
    /// The number of connections, n; each gets every n-th step.
    pub of: u32,
    /// Steps before this one are not sent.
    pub from_step: u64,
}

impl Lane {
    /// Parses the query of the request.
    ///
    /// # Errors
    /// `Invalid` if a value is not a number, or the connection is not one of that many.
    pub fn parse<'a>(query: impl Fn(&str) -> Option<&'a str>) -> Result<Self> {
        let number = |name: &str, default: u64| match query(name) {
            None => Ok(default),
            Some(text) => text.parse::<u64>().map_err(|_| {
                Error::invalid(format!(
                    "{name}={} is not a number",
                    forebay_core::name::shorten(text)
                ))
            }),
        };
        let small = |name: &str, default: u64| {
            number(name, default).and_then(|n| {
                u32::try_from(n).map_err(|_| Error::invalid(format!("{name}={n} is too large")))
            })
        };
        let lane = Lane {
            connection: small("connection", 0)?,
            of: small("of", 1)?,
            from_step: number("from_step", 0)?,
        };
        lane.check().map(|()| lane)
    }

    /// The query for these values.
    pub fn query(&self) -> String {
        format!(
            "connection={}&of={}&from_step={}",
            self.connection, self.of, self.from_step
        )
    }

    /// # Errors
    /// `Invalid` if the connection is not one of that many, or for steps that no plan has.
    pub fn check(&self) -> Result<()> {
        if self.of == 0 || self.of > limits::STREAM_CONNECTIONS_MAX || self.connection >= self.of {
            return Err(Error::invalid(format!(
                "connection {} of {} does not exist",
                self.connection, self.of
            ))
            .hint(format!(
                "connections are numbered from 0, and there can be 1 to {}",
                limits::STREAM_CONNECTIONS_MAX
            )));
        }
        if self.from_step > 1 << 60 {
            return Err(Error::invalid(format!(
                "from_step={} is too large",
                self.from_step
            )));
        }
        Ok(())
    }

    /// The first step that is sent.
    pub fn first(&self) -> u64 {
        let (connection, of) = (u64::from(self.connection), u64::from(self.of));
        self.from_step + (connection + of - self.from_step % of) % of
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_and_checked() {
        let json = br#"{"plan": {"sources": [{"dataset": "d"}], "seed": 7, "shuffle": {"kind": "block", "blocks": 16}},
            "partition": {"world": 8, "rank": 3, "batch": {"rows": 32}}, "columns": ["text"], "window_bytes": 1000000}"#;
        let request = StreamRequest::parse(json).unwrap();
        assert_eq!(
            (request.partition.rank, request.columns.as_deref()),
            (3, Some(&["text".to_owned()][..]))
        );
        assert_eq!(
            StreamRequest::parse(&serde_json::to_vec(&request).unwrap()).unwrap(),
            request
        );
        for bad in [
            "",
            "{}",
            "[]",
            r#"{"plan": {"sources": []}, "partition": {"batch": {"rows": 1}}, "windw": 1}"#,
        ] {
            assert_eq!(
                StreamRequest::parse(bad.as_bytes()).unwrap_err().kind(),
                forebay_core::ErrorKind::Invalid,
                "{bad}"
            );
        }
        let huge = format!(
            r#"{{"plan": {{"sources": []}}, "partition": {{"batch": {{"rows": 1}}}}, "window_bytes": {}}}"#,
            1u64 << 40
        );
        assert!(StreamRequest::parse(huge.as_bytes()).is_err());
    }

    #[test]
    fn a_lane_is_read_as_it_is_written() {
        let lane = Lane {
            connection: 3,
            of: 16,
            from_step: 1 << 40,
        };
        let query = lane.query();
        let value = |name: &str| {
            let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
            pairs.find(|(n, _)| *n == name).map(|(_, value)| value)
        };
        assert_eq!(Lane::parse(value).unwrap(), lane);
    }

    #[test]
    fn a_lane_is_every_nth_step_from_where_it_begins() {
        let lane = |query: &'static [(&str, &str)]| {
            Lane::parse(|name| query.iter().find(|(n, _)| *n == name).map(|(_, v)| *v))
        };
        assert_eq!(
            lane(&[]).unwrap(),
            Lane {
                connection: 0,
                of: 1,
                from_step: 0
            }
        );
        let first = |connection, from_step| {
            Lane {
                connection,
                of: 4,
                from_step,
            }
            .first()
        };
        assert_eq!(
            [
                first(0, 0),
                first(3, 0),
                first(0, 1),
                first(1, 1),
                first(3, 7),
                first(2, 7)
            ],
            [0, 3, 4, 1, 7, 10]
        );
        for bad in [
            &[("of", "0")][..],
            &[("of", "2"), ("connection", "2")],
            &[("of", "x")],
            &[("of", "99999")],
            &[("from_step", "99999999999999999999")],
        ] {
            assert!(lane(bad).is_err(), "{bad:?}");
        }
    }
}
