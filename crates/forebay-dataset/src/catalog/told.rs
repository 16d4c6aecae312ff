//! What clients told this node of datasets, by its id: compositions, and the lengths of rows.
//!
//! It is kept in RAM only, what was used least recently goes, and a node that does not know it says
//! so: whoever reads by it has it and tells it again.

use super::{registry::Datasets, view::View};
use crate::{Access, blocking::blocking};
use bytes::Bytes;
use forebay_core::{Error, ErrorKind, Result, sync::Mutex};
use forebay_protocol::composition::{self, Parts};
use std::{collections::HashMap, sync::Arc};

/// Sets grow in memory by up to this, and row numbers get an index.
const MEMORY_FOR_EACH_BYTE: u64 = 4;

/// What is in RAM.
#[derive(Default)]
pub(super) struct Told(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    by_id: HashMap<String, (Known, u64)>,
    uses: u64,
}

#[derive(Clone)]
enum Known {
    View(Arc<View>),
    Lengths(Arc<[u32]>),
}

impl Known {
    fn memory_bytes(&self) -> u64 {
        match self {
            Known::View(view) => view.memory_bytes(),
            Known::Lengths(lengths) => size_of_val(&**lengths) as u64,
        }
    }
}

impl Kept {
    fn get(&mut self, id: &str) -> Option<Known> {
        self.uses += 1;
        let (known, used) = self.by_id.get_mut(id)?;
        *used = self.uses;
        Some(known.clone())
    }

    fn view(&mut self, id: &str) -> Option<Arc<View>> {
        match self.get(id)? {
            Known::View(view) => Some(view),
            Known::Lengths(_) => None,
        }
    }

    fn keep(&mut self, id: &str, known: Known, most: u64) {
        self.uses += 1;
        self.by_id.insert(id.to_owned(), (known, self.uses));
        let mut total = self.memory_bytes();
        while total > most && self.by_id.len() > 1 {
            let others = self.by_id.iter().filter(|(other, _)| *other != id);
            let oldest = others.min_by_key(|(_, (_, used))| *used);
            let oldest = oldest.map(|(id, _)| id.clone());
            let Some((gone, _)) = oldest.and_then(|id| self.by_id.remove(&id)) else {
                break;
            };
            total -= gone.memory_bytes().min(total);
        }
    }

    fn memory_bytes(&self) -> u64 {
        self.by_id
            .values()
            .map(|(known, _)| known.memory_bytes())
            .sum()
    }
}

impl Datasets {
    /// Rows that are made of those of datasets which are open here, as a client describes them: the
    /// body of the request.
    ///
    /// # Errors
    /// `Invalid` for a description that makes no sense, `NotFound` for a dataset that is not known
    /// here, `PermissionDenied`, `Busy` if there is no memory to read it.
    pub async fn compose(&self, body: Bytes, access: &dyn Access) -> Result<Arc<View>> {
        let budget = self.engine().budget();
        let bytes = (body.len() as u64).saturating_mul(MEMORY_FOR_EACH_BYTE);
        let held = budget.hold(bytes.min(budget.holdable_bytes() / 2)).await?;
        let parts = blocking(move || Parts::read(&body)).await??;
        let mut bases = Vec::with_capacity(parts.header.bases.len());
        for id in &parts.header.bases {
            bases.push(self.get(id, access).await?);
        }
        let view = blocking(move || {
            let view = View::composed(&parts, bases).map(Arc::new);
            drop(held);
            view
        });
        let view = view.await??;
        let mut kept = self.told().0.lock();
        // One for all who use it.
        if let Some(known) = kept.view(view.id()) {
            return Ok(known);
        }
        kept.keep(view.id(), Known::View(view.clone()), self.told_most());
        Ok(view)
    }

    /// Takes the lengths of rows, one for each row of a source of a plan: the body of the request.
    /// Returns their id, and how many they are.
    ///
    /// # Errors
    /// `Invalid` for anything else, `Busy` if there is no memory to read it.
    pub async fn measure(&self, body: Bytes) -> Result<(String, u64)> {
        let budget = self.engine().budget();
        let held = budget.hold((body.len() as u64 * 2).min(budget.holdable_bytes() / 2));
        let held = held.await?;
        let read = blocking(move || {
            let lengths: Arc<[u32]> = composition::read_lengths(&body)?.into();
            drop(held);
            Ok((composition::lengths_identity(&body), lengths))
        });
        let (id, lengths) = read.await??;
        let rows = lengths.len() as u64;
        let most = self.told_most();
        self.told()
            .0
            .lock()
            .keep(&id, Known::Lengths(lengths), most);
        Ok((id, rows))
    }

    /// Lengths that were told before.
    ///
    /// # Errors
    /// `NotFound` if they are not known here (any more).
    pub fn lengths(&self, id: &str) -> Result<Arc<[u32]>> {
        match self.told().0.lock().get(id) {
            Some(Known::Lengths(lengths)) => Ok(lengths),
            _ => {
                let id = forebay_core::name::shorten(id);
                let e = Error::not_found(format!("this node does not know the lengths {id:?}"));
                Err(e.hint("tell it of them: POST /v1/datasets/lengths"))
            }
        }
    }

    /// What a plan calls a dataset: one that was opened, or a composition.
    ///
    /// # Errors
    /// `NotFound` if it is not known here (any more); `PermissionDenied`.
    pub async fn view(&self, id: &str, access: &dyn Access) -> Result<Arc<View>> {
        let known = self.told().0.lock().view(id);
        match known {
            Some(view) => {
                for base in view.bases() {
                    base.allow(access).await?;
                }
                Ok(view)
            }
            None => Ok(Arc::new(View::whole(self.get(id, access).await?))),
        }
    }

    /// A composition that was described before.
    ///
    /// # Errors
    /// As [`Datasets::view`].
    pub async fn composition(&self, id: &str, access: &dyn Access) -> Result<Arc<View>> {
        let known = self.told().0.lock().view(id);
        match known {
            Some(_) => self.view(id, access).await,
            None => Err(super::registry::unknown(id)),
        }
    }

    /// All sources of a plan.
    ///
    /// # Errors
    /// As [`Datasets::view`].
    pub async fn views<'a>(
        &self,
        ids: impl Iterator<Item = &'a str> + Send,
        access: &dyn Access,
    ) -> Result<super::view::Views> {
        let mut views = Vec::new();
        for id in ids {
            let found = self.view(id, access).await;
            views.push(found.map_err(|e| match e.kind() {
                ErrorKind::NotFound => e.hint(
                    "open the dataset at each node that reads it: POST /v1/datasets; what is made \
                     of datasets: POST /v1/datasets/compositions",
                ),
                _ => e,
            })?);
        }
        Ok(super::view::Views::new(views))
    }

    /// What clients told of datasets and is in RAM, and the memory it takes.
    pub fn told_kept(&self) -> (usize, u64) {
        let kept = self.told().0.lock();
        (kept.by_id.len(), kept.memory_bytes())
    }
}
