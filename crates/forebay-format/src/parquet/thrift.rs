//! Just enough of Thrift's compact protocol to walk Parquet's footers and page headers without
//! building them.
//!
//! [`super::fields`] says what a field must be.
//!
//! Nothing is allocated, no length beyond the available bytes is trusted, and recursion has a
//! limit.

/// What is wrong, and where in the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bad {
    pub at: usize,
    pub what: &'static str,
}

type Result<T> = std::result::Result<T, Bad>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    Bool(bool),
    I8,
    I16,
    I32,
    I64,
    Double,
    Binary,
    List,
    Map,
    Struct,
    Uuid,
}

/// What a value is, if the format says so.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Bool,
    I8,
    I16,
    I32,
    I64,
    Double,
    Binary,
    List(&'static Kind),
    /// Its fields by number; others are skipped.
    Struct(&'static [(i16, Kind)]),
}

/// Deepest nesting of skipped values.
const DEPTH_MAX: u32 = 32;

#[derive(Debug)]
pub(super) struct Compact<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Compact<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// The current position.
    pub fn at(&self) -> usize {
        self.at
    }

    pub fn bad(&self, what: &'static str) -> Bad {
        Bad { at: self.at, what }
    }

    #[inline]
    fn byte(&mut self) -> Result<u8> {
        let b = *self
            .bytes
            .get(self.at)
            .ok_or(self.bad("it ends too early"))?;
        self.at += 1;
        Ok(b)
    }

    #[inline]
    fn varint(&mut self) -> Result<u64> {
        // Most numbers are small.
        if let Some(&b) = self.bytes.get(self.at).filter(|&&b| b < 0x80) {
            self.at += 1;
            return Ok(u64::from(b));
        }
        self.long_varint()
    }

    fn long_varint(&mut self) -> Result<u64> {
        let mut v = 0u64;
        for shift in (0..64).step_by(7) {
            let b = self.byte()?;
            v |= u64::from(b & 0x7f) << shift;
            if b < 0x80 {
                return Ok(v);
            }
        }
        Err(self.bad("a number has too many bytes"))
    }

    #[inline]
    pub fn int(&mut self) -> Result<i64> {
        let v = self.varint()?;
        Ok((v >> 1) as i64 ^ -((v & 1) as i64))
    }

    pub fn i32(&mut self) -> Result<i32> {
        let v = self.int()?;
        i32::try_from(v).map_err(|_| self.bad("a number of 32 bits has more"))
    }

    pub fn binary(&mut self) -> Result<&'a [u8]> {
        let len = self.varint()?;
        let rest = &self.bytes[self.at..];
        let taken = usize::try_from(len)
            .ok()
            .and_then(|n| rest.get(..n))
            .ok_or(self.bad("a string is longer than the rest"))?;
        self.at += taken.len();
        Ok(taken)
    }

    /// The fields of a struct. `f` returns whether it took the field's value; otherwise the value
    /// is skipped, and must be what `known` says.
    pub fn fields(
        &mut self,
        known: &[(i16, Kind)],
        f: impl FnMut(&mut Self, i16, Type) -> Result<bool>,
    ) -> Result<()> {
        self.fields_at(known, 0, f)
    }

    fn fields_at(
        &mut self,
        known: &[(i16, Kind)],
        depth: u32,
        mut f: impl FnMut(&mut Self, i16, Type) -> Result<bool>,
    ) -> Result<()> {
        let mut last = 0i16;
        while let Some((id, ty)) = self.field(last)? {
            last = id;
            if !f(self, id, ty)? {
                match known.iter().find(|(number, _)| *number == id) {
                    Some((_, kind)) => self.pass(ty, kind, depth)?,
                    None => self.skip(ty, depth)?,
                }
            }
        }
        Ok(())
    }

    /// Skips a value that must be of `kind`, with everything in it.
    fn pass(&mut self, ty: Type, kind: &Kind, depth: u32) -> Result<()> {
        match (kind, ty) {
            (Kind::List(kind), Type::List) => {
                let (ty, n) = self.list()?;
                for _ in 0..n {
                    self.pass(ty, kind, depth + 1)?;
                }
                Ok(())
            }
            (Kind::Struct(known), Type::Struct) => {
                self.fields_at(known, depth + 1, |_, _, _| Ok(false))
            }
            (Kind::Bool, Type::Bool(_))
            | (Kind::I8, Type::I8)
            | (Kind::I16, Type::I16)
            | (Kind::I32, Type::I32)
            | (Kind::I64, Type::I64)
            | (Kind::Double, Type::Double)
            | (Kind::Binary, Type::Binary) => self.skip(ty, depth),
            _ => Err(self.bad("a field does not have the type that the format says")),
        }
    }

    #[inline]
    fn field(&mut self, last: i16) -> Result<Option<(i16, Type)>> {
        let head = self.byte()?;
        if head == 0 {
            return Ok(None);
        }
        let ty = self.kind(head & 15)?;
        let id = match head >> 4 {
            0 => i16::try_from(self.int()?)
                .map_err(|_| self.bad("a field has an impossible number"))?,
            delta => last
                .checked_add(i16::from(delta))
                .ok_or(self.bad("a field has an impossible number"))?,
        };
        Ok(Some((id, ty)))
    }

    #[inline]
    fn kind(&self, code: u8) -> Result<Type> {
        Ok(match code {
            1 => Type::Bool(true),
            2 => Type::Bool(false),
            3 => Type::I8,
            4 => Type::I16,
            5 => Type::I32,
            6 => Type::I64,
            7 => Type::Double,
            8 => Type::Binary,
            9 | 10 => Type::List,
            11 => Type::Map,
            12 => Type::Struct,
            13 => Type::Uuid,
            _ => return Err(self.bad("a field has an unknown type")),
        })
    }

    /// The head of a list: element type and count. No element takes less than a byte.
    #[inline]
    pub fn list(&mut self) -> Result<(Type, usize)> {
        let head = self.byte()?;
        if head == 0 {
            // Some writers give an empty list no type.
            return Ok((Type::Struct, 0));
        }
        let ty = self.kind(head & 15)?;
        let len = match head >> 4 {
            15 => self.varint()?,
            short => u64::from(short),
        };
        match usize::try_from(len) {
            Ok(n) if n <= self.bytes.len() - self.at => Ok((ty, n)),
            _ => Err(self.bad("a list is longer than the rest")),
        }
    }

    /// An element of a list of booleans, whose two forms of false both occur.
    pub fn bool_element(&mut self) -> Result<bool> {
        match self.byte()? {
            1 => Ok(true),
            0 | 2 => Ok(false),
            _ => Err(self.bad("a boolean is neither true nor false")),
        }
    }

    pub fn skip(&mut self, ty: Type, depth: u32) -> Result<()> {
        if depth > DEPTH_MAX {
            return Err(self.bad("values are nested too deeply"));
        }
        match ty {
            // In a field, the head holds the value.
            Type::Bool(_) => {}
            Type::I8 => drop(self.byte()?),
            Type::I16 | Type::I32 | Type::I64 => drop(self.varint()?),
            Type::Double => self.jump(8)?,
            Type::Uuid => self.jump(16)?,
            Type::Binary => drop(self.binary()?),
            Type::List => {
                let (ty, n) = self.list()?;
                for _ in 0..n {
                    self.skip_element(ty, depth + 1)?;
                }
            }
            Type::Map => {
                let n = self.varint()?;
                if n > 0 {
                    let types = self.byte()?;
                    let (key, value) = (self.kind(types >> 4)?, self.kind(types & 15)?);
                    for _ in 0..n {
                        self.skip_element(key, depth + 1)?;
                        self.skip_element(value, depth + 1)?;
                    }
                }
            }
            Type::Struct => {
                let mut last = 0;
                while let Some((id, ty)) = self.field(last)? {
                    last = id;
                    self.skip(ty, depth + 1)?;
                }
            }
        }
        Ok(())
    }

    fn skip_element(&mut self, ty: Type, depth: u32) -> Result<()> {
        match ty {
            // Readers disagree on whether a boolean takes a byte, and nothing in footers and page
            // headers uses such lists.
            Type::Bool(_) => Err(self.bad("a list has booleans in it")),
            ty => self.skip(ty, depth),
        }
    }

    #[inline]
    fn jump(&mut self, n: usize) -> Result<()> {
        if self.bytes.len() - self.at < n {
            return Err(self.bad("it ends too early"));
        }
        self.at += n;
        Ok(())
    }
}
