//! The structs of Parquet, as far as a decoder reads them (`parquet.thrift` of the format).
//!
//! The decoder interprets a field by its number and ignores the type next to it. A field of another
//! type would make it continue at other bytes than those that [`super::footer`] and
//! [`super::pages`] looked at, so it is refused wherever it is. Statistics, keys and values of
//! columns, and encrypted parts are not here: both sides skip them.

use super::thrift::Kind::{self, Binary, Bool, Double, I8, I16, I32, I64, List, Struct};

pub(super) type Fields = [(i16, Kind)];

const EMPTY: Kind = Struct(&[]);

pub(super) const FILE_META_DATA: &Fields = &[
    (1, I32),
    (2, List(&Struct(SCHEMA_ELEMENT))),
    (3, I64),
    (4, List(&Struct(ROW_GROUP))),
    (5, List(&Struct(KEY_VALUE))),
    (6, Binary),
    (7, List(&Struct(&[(1, EMPTY), (2, EMPTY)]))),
    (8, EMPTY),
    (9, Binary),
];

pub(super) const SCHEMA_ELEMENT: &Fields = &[
    (1, I32),
    (2, I32),
    (3, I32),
    (4, Binary),
    (5, I32),
    (6, I32),
    (7, I32),
    (8, I32),
    (9, I32),
    (10, Struct(LOGICAL_TYPE)),
];

const LOGICAL_TYPE: &Fields = &[
    (1, EMPTY),
    (2, EMPTY),
    (3, EMPTY),
    (4, EMPTY),
    (5, Struct(&[(1, I32), (2, I32)])),
    (6, EMPTY),
    (7, TIME),
    (8, TIME),
    (10, Struct(&[(1, I8), (2, Bool)])),
    (11, EMPTY),
    (12, EMPTY),
    (13, EMPTY),
    (14, EMPTY),
    (15, EMPTY),
    (16, Struct(&[(1, I8)])),
    (17, Struct(&[(1, Binary)])),
    (18, Struct(&[(1, Binary), (2, I32)])),
    (19, EMPTY),
];

const TIME: Kind = Struct(&[
    (1, Bool),
    (2, Struct(&[(1, EMPTY), (2, EMPTY), (3, EMPTY)])),
]);

pub(super) const KEY_VALUE: &Fields = &[(1, Binary), (2, Binary)];

pub(super) const ROW_GROUP: &Fields = &[
    (1, List(&Struct(COLUMN_CHUNK))),
    (2, I64),
    (3, I64),
    (4, List(&Struct(&[(1, I32), (2, Bool), (3, Bool)]))),
    (5, I64),
    (6, I64),
    (7, I16),
];

pub(super) const COLUMN_CHUNK: &Fields = &[
    (1, Binary),
    (2, I64),
    (3, Struct(COLUMN_META_DATA)),
    (4, I64),
    (5, I32),
    (6, I64),
    (7, I32),
    (8, EMPTY),
    (9, Binary),
];

pub(super) const COLUMN_META_DATA: &Fields = &[
    (1, I32),
    (2, List(&I32)),
    (3, List(&Binary)),
    (4, I32),
    (5, I64),
    (6, I64),
    (7, I64),
    (9, I64),
    (10, I64),
    (11, I64),
    (14, I64),
    (15, I32),
    (17, Struct(&[(1, Struct(BOUNDING_BOX)), (2, List(&I32))])),
];

const BOUNDING_BOX: &Fields = &[
    (1, Double),
    (2, Double),
    (3, Double),
    (4, Double),
    (5, Double),
    (6, Double),
    (7, Double),
    (8, Double),
];

pub(super) const PAGE_HEADER: &Fields = &[
    (1, I32),
    (2, I32),
    (3, I32),
    (4, I32),
    (5, Struct(DATA_PAGE_HEADER)),
    (6, EMPTY),
    (7, Struct(DICTIONARY_PAGE_HEADER)),
    (8, Struct(DATA_PAGE_HEADER_V2)),
];

pub(super) const DATA_PAGE_HEADER: &Fields = &[(1, I32), (2, I32), (3, I32), (4, I32)];
pub(super) const DICTIONARY_PAGE_HEADER: &Fields = &[(1, I32), (2, I32), (3, Bool)];
pub(super) const DATA_PAGE_HEADER_V2: &Fields = &[
    (1, I32),
    (2, I32),
    (3, I32),
    (4, I32),
    (5, I32),
    (6, I32),
    (7, Bool),
];
