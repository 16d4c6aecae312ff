//! A single description of each setting: the struct's field, its default and its documentation come
//! from the same lines, and the reference page is generated from them.

/// A section of the configuration with its documentation.
pub trait Described {
    /// The section's documentation, line by line.
    const DOC: &'static [&'static str];
    /// Its settings, in the order of declaration: name and documentation.
    const FIELDS: &'static [(&'static str, &'static [&'static str])];
}

/// Declares a section: documentation, fields with documentation, type and default.
macro_rules! section {
    ($(#[doc = $doc:literal])* $name:ident { $( $(#[doc = $field_doc:literal])* $field:ident : $ty:ty = $default:expr ),* $(,)? }) => {
        $(#[doc = $doc])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name { $( $(#[doc = $field_doc])* pub $field: $ty, )* }

        impl Default for $name {
            fn default() -> Self {
                Self { $( $field: $default, )* }
            }
        }

        impl $crate::config::section::Described for $name {
            const DOC: &'static [&'static str] = &[$($doc),*];
            const FIELDS: &'static [(&'static str, &'static [&'static str])] = &[$( (stringify!($field), &[$($field_doc),*]) ),*];
        }
    };
}
pub(crate) use section;
