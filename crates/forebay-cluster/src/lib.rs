//! Which node of a cluster has what, as pure functions: no I/O, no clock.
//!
//! - [`Map`]: the one small document that all nodes agree on: who is a member, with which weight
//!   and in which zone, and an epoch that orders its versions.
//! - [`Table`]: the two best nodes of each of 2^18 slots, computed from a map. Placement is never
//!   looked up anywhere.
//! - [`Unit`]: what is placed, and which slot it lies in.
//! - [`View`]: what one node makes of the maps that it has seen: whom it asks for a unit, and in
//!   which order.
//! - [`Membership`]: which map comes next, by who is there and what operators order.
//! - [`Terms`]: who is told of a write before it is acknowledged, and when a node may answer from
//!   the heads that it keeps.
//! - [`forecast`]: what a change of the map moves, by the same code that places.
//! - [`simulate`]: lives of clusters of any size, in which all of this must hold.
//!
//! # Invariants
//!
//! The same map gives the same table on every platform and in every release that has the same
//! [`PLACEMENT`] number: the logarithm is our own, and the table's checksum is in the map. A node
//! that joins takes slots from others and moves nothing between them; one that leaves gives its own.

#![warn(missing_docs)]

pub mod forecast;
mod logarithm;
mod map;
mod membership;
pub mod simulate;
mod table;
mod terms;
mod view;

pub use map::{Map, Member, MemberState, member_named};
pub use membership::{Membership, Order};
pub use table::{COPIES_MAX, EXTENT_BYTES, Owners, SLOT_BITS, SLOTS, Table, Unit};
pub use terms::{DOUBTS_MAX, Doubts, Run, Term, Terms};
pub use view::{Ask, Change, HAND_OVER_MAX, Placed, Route, Source, Standing, View};

/// Identifies the placement algorithm. A node that uses another one cannot join.
pub const PLACEMENT: u32 = 1;
