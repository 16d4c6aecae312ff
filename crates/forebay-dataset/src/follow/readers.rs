//! Who reads a plan through this node: which ranks, which columns, and where they are.
//!
//! Each lease says what its job reads. Leases of ranks of one job are one reader here, at the place
//! of the rank that is furthest behind; so are leases that read the whole order. There are few
//! readers of a plan, however many leases.

use super::layout::Layout;
use crate::rows::KeptDecoded;
use forebay_core::{Error, Result, limits, sync::Mutex};
use forebay_format::tabular::Projection;
use forebay_plan::Share;
use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    sync::Arc,
};

/// Leases that read alike.
#[derive(Clone)]
pub(crate) struct Reader {
    /// `None`: the whole order.
    pub share: Option<Share>,
    /// `None`: all of them.
    pub columns: Option<Arc<Columns>>,
    /// The position over all epochs of the one that is furthest behind.
    pub at: u64,
    /// The epoch before which the last of them ends.
    pub until_epoch: u64,
    /// What may be fetched ahead for them.
    pub ahead_bytes: u64,
    /// So many rows are read at a time that nearly every block has some among them.
    pub together: bool,
}

impl Reader {
    /// Whether it is a part of the order only.
    pub fn is_part(&self) -> bool {
        self.share.is_some()
    }

    pub fn has(&self, epoch: u64, position: u64) -> bool {
        (self.share.as_ref()).is_none_or(|share| share.has(epoch, position))
    }

    /// The positions among these that it reads, as runs.
    pub fn runs(&self, epoch: u64, positions: Range<u64>, mut each: impl FnMut(Range<u64>)) {
        match &self.share {
            None => each(positions),
            Some(share) => share.runs(epoch, positions, each),
        }
    }

    /// How many of how many positions are its own.
    pub fn part(&self) -> (u64, u64) {
        self.share.as_ref().map_or((1, 1), Share::of)
    }

    fn alike(&self, other: &Reader) -> bool {
        let columns = match (&self.columns, &other.columns) {
            (None, None) => true,
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        columns
            && (self.ahead_bytes > 0) == (other.ahead_bytes > 0)
            && self.together == other.together
    }

    /// Becomes a reader for both, if they read alike.
    fn takes(&mut self, other: &Reader) -> bool {
        let share = match (&self.share, &other.share) {
            _ if !self.alike(other) => return false,
            (None, None) => None,
            (Some(a), Some(b)) => match a.joined(b) {
                Some(both) => Some(both),
                None => return false,
            },
            _ => return false,
        };
        self.share = share;
        self.furthest(other);
        self.ahead_bytes = self.ahead_bytes.max(other.ahead_bytes);
        true
    }

    fn furthest(&mut self, other: &Reader) {
        self.at = self.at.min(other.at);
        self.until_epoch = self.until_epoch.max(other.until_epoch);
    }

    /// Whether both read the same, wherever they are.
    fn reads_as(&self, other: &Reader) -> bool {
        self.alike(other) && self.share == other.share && self.until_epoch == other.until_epoch
    }
}

/// The readers of a plan.
#[derive(Clone, Default)]
pub(crate) struct Readers {
    pub list: Vec<Reader>,
    /// Changes whenever somebody reads something else than before.
    pub generation: u64,
}

impl Readers {
    /// Those of all leases, in an order that does not change from call to call, after `before`; and
    /// for each lease which one it is.
    pub fn of(leases: impl Iterator<Item = Reader>, before: &Readers) -> (Self, Vec<usize>) {
        let mut list: Vec<Reader> = Vec::new();
        let mut numbers: Vec<usize> = leases
            .map(|lease| {
                let found = list.iter_mut().position(|reader| reader.takes(&lease));
                found.unwrap_or_else(|| {
                    list.push(lease);
                    list.len() - 1
                })
            })
            .collect();
        if list.len() > limits::PLAN_READERS_MAX
            && let Some(one) = whole(&list)
        {
            list = vec![one];
            numbers.fill(0);
        }
        let same = list.len() == before.list.len()
            && list.iter().zip(&before.list).all(|(a, b)| a.reads_as(b));
        let generation = before.generation + u64::from(!same);
        (Self { list, generation }, numbers)
    }

    /// The same readers, whose leases (of these numbers) are at these places now.
    pub fn moved(&self, places: impl Iterator<Item = (usize, u64)>) -> Self {
        let mut least = vec![u64::MAX; self.list.len()];
        for (number, at) in places {
            if let Some(least) = least.get_mut(number) {
                *least = at.min(*least);
            }
        }
        let mut moved = self.clone();
        for (reader, at) in moved.list.iter_mut().zip(least) {
            if at < u64::MAX {
                reader.at = at;
            }
        }
        moved
    }
}

/// One that reads all that these and the ranks of other nodes read.
pub(crate) fn whole(list: &[Reader]) -> Option<Reader> {
    let mut one = Reader {
        share: None,
        columns: None,
        ahead_bytes: 0,
        together: list.iter().all(|reader| reader.together),
        ..list.first()?.clone()
    };
    list.iter().for_each(|other| one.furthest(other));
    Some(one)
}

/// The columns that are read, and what is known of where they lie.
pub(crate) struct Columns {
    names: Vec<String>,
    /// For each dataset of the plan, those that it has.
    bases: Vec<Projection>,
    /// And what holds them decoded.
    decoded: Vec<Option<KeptDecoded>>,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// By dataset and block.
    places: HashMap<(u32, u64), Arc<[Range<u64>]>>,
    bytes: u64,
    rows: u64,
}

impl Columns {
    /// # Errors
    /// `Invalid` for a column that none of the datasets has, and for too many.
    pub fn new(names: &[String], layouts: &[Arc<Layout>]) -> Result<Self> {
        if names.len() > limits::PLAN_LEASE_COLUMNS_MAX {
            return Err(
                Error::invalid(format!("{} columns", names.len())).hint(format!(
                    "name at most {}, or leave `columns` out for all",
                    limits::PLAN_LEASE_COLUMNS_MAX
                )),
            );
        }
        // A dataset may be there many times, with thousands of columns.
        let mut known: HashMap<&str, Projection> = HashMap::new();
        let mut found: HashSet<&str> = HashSet::new();
        for layout in layouts {
            let dataset = layout.dataset();
            if known.contains_key(dataset.id()) {
                continue;
            }
            let schema = dataset.schema().fields().iter().map(|f| f.name().as_str());
            let besides = dataset.besides();
            let besides = besides.iter().map(|f| f.name().as_str());
            let all: HashSet<&str> = schema.chain(besides).collect();
            let mut taken = HashSet::new();
            let own = names.iter().map(String::as_str);
            let own = own.filter(|name| all.contains(name) && taken.insert(*name));
            let own: Vec<String> = own.map(str::to_owned).collect();
            found.extend(taken);
            known.insert(dataset.id(), Projection::Columns(own));
        }
        if let Some(unknown) = names.iter().find(|name| !found.contains(name.as_str())) {
            return Err(
                Error::invalid(format!("no dataset of the plan has a column {unknown:?}"))
                    .hint("name columns of its datasets, or leave `columns` out for all"),
            );
        }
        let bases = layouts.iter().map(|l| known[l.dataset().id()].clone());
        let bases: Vec<Projection> = bases.collect();
        let decoded = layouts.iter().zip(&bases);
        let decoded = decoded.map(|(layout, own)| KeptDecoded::of(layout.dataset(), own));
        Ok(Self {
            names: names.to_vec(),
            decoded: decoded.collect(),
            bases,
            known: Mutex::default(),
        })
    }

    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Those of one dataset.
    pub fn of(&self, base: u32) -> Option<&Projection> {
        self.bases.get(base as usize)
    }

    /// What holds those of one dataset decoded.
    pub fn decoded(&self, base: u32) -> Option<&KeptDecoded> {
        self.decoded.get(base as usize)?.as_ref()
    }

    /// Whether a dataset's column of this name is read.
    pub fn reads(&self, base: u32, name: &str) -> bool {
        match self.of(base) {
            Some(Projection::Columns(own)) => own.iter().any(|n| n == name),
            Some(Projection::All) | None => true,
        }
    }

    /// Where they lie in a block, if that is known.
    pub fn places(&self, base: u32, block: u64) -> Option<Arc<[Range<u64>]>> {
        self.known.lock().places.get(&(base, block)).cloned()
    }

    /// Remembers where they lie in a block.
    pub fn learn(&self, base: u32, block: u64, places: Arc<[Range<u64>]>) {
        let mut known = self.known.lock();
        if known.places.len() < limits::PLAN_COLUMN_BLOCKS_MAX {
            known.places.insert((base, block), places);
        }
    }

    /// So many rows have so many bytes of them.
    pub fn weigh(&self, rows: u64, bytes: u64) {
        let mut known = self.known.lock();
        known.bytes = known.bytes.saturating_add(bytes);
        known.rows = known.rows.saturating_add(rows);
    }

    /// Whether any of them may have bytes of this range of a block's file.
    pub fn may_lie_in(&self, base: u32, block: u64, bytes: &Range<u64>) -> bool {
        self.places(base, block).is_none_or(|places| {
            places
                .iter()
                .any(|r| r.start < bytes.end && bytes.start < r.end)
        })
    }

    /// Bytes of them in an average row, as far as is known.
    pub fn row_bytes(&self) -> Option<u64> {
        let known = self.known.lock();
        (known.rows > 0).then(|| (known.bytes / known.rows).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_plan::{Batching, Partition, Plan, PlanSpec, Shape, Shuffle, Uneven};

    fn share(world: u32, ranks: &[u32], begin: u64) -> Option<Share> {
        let shape = Arc::new(Shape::uniform(1000, 10).unwrap());
        let plan = Plan::new(PlanSpec::single("d", shape, 1, Shuffle::Full)).unwrap();
        let partition = Partition {
            world,
            rank: 0,
            batch: Batching::Rows(5),
            uneven: Uneven::Drop,
        };
        Share::new(&plan, partition, ranks, (0, begin)).unwrap()
    }

    fn reader(share: Option<Share>, at: u64) -> Reader {
        Reader {
            share,
            columns: None,
            at,
            until_epoch: 3,
            together: false,
            ahead_bytes: 100,
        }
    }

    fn of(leases: &[Reader], before: &Readers) -> Readers {
        let (readers, numbers) = Readers::of(leases.iter().cloned(), before);
        let places = || numbers.iter().copied().zip(leases.iter().map(|l| l.at));
        let there = readers.moved(places());
        let ats = |of: &Readers| of.list.iter().map(|r| r.at).collect::<Vec<_>>();
        assert_eq!(ats(&there), ats(&readers), "each is where its leases are");
        let on = readers.moved(places().map(|(number, at)| (number, at + 3)));
        let all = |by| readers.list.iter().map(|r| r.at + by).collect::<Vec<_>>();
        assert_eq!(ats(&on), all(3));
        readers
    }

    #[test]
    fn ranks_of_a_job_are_one_reader_at_the_place_of_the_furthest_behind() {
        let begun = Readers::default();
        let two = [
            reader(share(4, &[0], 0), 40),
            reader(share(4, &[2], 0), 20),
            reader(None, 7),
        ];
        let readers = of(&two, &begun);
        assert_eq!(readers.list.len(), 2);
        let job = &readers.list[0];
        assert_eq!((job.at, job.part()), (20, (2, 4)));
        assert!(job.has(0, 3) && job.has(0, 12) && !job.has(0, 7));
        assert!(readers.list[1].has(0, 7), "it reads everything");

        // Moving changes nothing of who reads.
        let moved = [
            reader(share(4, &[0], 0), 60),
            two[1].clone(),
            two[2].clone(),
        ];
        let after = of(&moved, &readers);
        assert_eq!(after.generation, readers.generation);
        // A rank that leaves is not waited for.
        let left = of(&moved[..1], &after);
        assert_eq!((left.list[0].at, left.list[0].part()), (60, (1, 4)));
        assert!(left.generation > after.generation);
        // A job that goes on with other ranks, or from elsewhere, is another reader.
        let resumed = [
            reader(share(2, &[0], 0), 60),
            reader(share(4, &[0], 3), 60),
            moved[0].clone(),
        ];
        assert_eq!(of(&resumed, &left).list.len(), 3);
    }

    #[test]
    fn too_many_readers_read_everything_and_nothing_ahead() {
        let many: Vec<Reader> = (0..=limits::PLAN_READERS_MAX as u64)
            .map(|n| reader(share(4, &[1], n % 20), 100 - n))
            .collect();
        let readers = of(&many, &Readers::default());
        let [one] = &readers.list[..] else {
            panic!("{} readers", readers.list.len())
        };
        let last = 100 - limits::PLAN_READERS_MAX as u64;
        assert_eq!((one.at, one.ahead_bytes, one.is_part()), (last, 0, false));
    }
}
