//! Compositions that clients told this node of, by their ids.
//!
//! They are kept in RAM only, the least recently used ones go, and a node that does not know one
//! says so: whoever reads by it has its parts and tells it again.

use super::{registry::Datasets, view::View};
use crate::{Access, blocking::blocking};
use bytes::Bytes;
use forebay_core::{ErrorKind, Result, sync::Mutex};
use forebay_protocol::composition::Parts;
use std::{collections::HashMap, sync::Arc};

/// Sets grow in memory by up to this, and row numbers get an index.
const MEMORY_FOR_EACH_BYTE: u64 = 4;

/// Compositions in RAM.
#[derive(Default)]
pub(super) struct KeptViews(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    by_id: HashMap<String, (Arc<View>, u64)>,
    uses: u64,
}

impl Kept {
    fn get(&mut self, id: &str) -> Option<Arc<View>> {
        self.uses += 1;
        let (view, used) = self.by_id.get_mut(id)?;
        *used = self.uses;
        Some(view.clone())
    }

    fn keep(&mut self, view: &Arc<View>, most: u64) {
        self.uses += 1;
        let kept = (view.clone(), self.uses);
        self.by_id.insert(view.id().to_owned(), kept);
        let mut total = self.memory_bytes();
        while total > most && self.by_id.len() > 1 {
            let others = self.by_id.iter().filter(|(id, _)| *id != view.id());
            let oldest = others.min_by_key(|(_, (_, used))| *used);
            let oldest = oldest.map(|(id, _)| id.clone());
            let Some((gone, _)) = oldest.and_then(|id| self.by_id.remove(&id)) else {
                break;
            };
            total -= gone.memory_bytes().min(total);
        }
    }

    fn memory_bytes(&self) -> u64 {
        self.by_id.values().map(|(v, _)| v.memory_bytes()).sum()
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
        let mut kept = self.composed().0.lock();
        // One for all who use it.
        if let Some(known) = kept.get(view.id()) {
            return Ok(known);
        }
        kept.keep(&view, self.composed_most());
        Ok(view)
    }

    /// What a plan calls a dataset: one that was opened, or a composition.
    ///
    /// # Errors
    /// `NotFound` if it is not known here (any more); `PermissionDenied`.
    pub async fn view(&self, id: &str, access: &dyn Access) -> Result<Arc<View>> {
        let known = self.composed().0.lock().get(id);
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
        let known = self.composed().0.lock().get(id);
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

    /// Compositions in RAM, and the memory they take.
    pub fn composed_kept(&self) -> (usize, u64) {
        let kept = self.composed().0.lock();
        (kept.by_id.len(), kept.memory_bytes())
    }
}
