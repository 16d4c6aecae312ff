//! `GET /v1/objects/BUCKET/ARCHIVE?archregx=…&archmode=…`: the members of one archive whose names
//! match, as a tar, in the archive's order and under their own names.
//!
//! The archive's index says which they are, where, and how long, so the answer's length is known
//! before its first byte. Then one cursor reads them one after the other, under the version that the
//! index is of; those that come next are brought to the local disk meanwhile, as in a batch.
//!
//! Invariant: all of an answer is of one version of the archive. If that is replaced meanwhile, what
//! is not here ends the answer in an error, inside an entry.

use super::{
    Call,
    objects::{identify, options, set},
};
use crate::{body::AnswerBody, object};
use bytes::Bytes;
use forebay_batch::BatchConfig;
use forebay_core::{
    CacheStatus, Error, ErrorKind, ObjectMeta, ObjectName, Reservation, Result,
    limits::{self, CHUNK_BYTES},
    name::shorten,
    request,
};
use forebay_engine::{Archive, ByteStream, Engine, ReadOptions, Repeated};
use forebay_format::{
    ArchiveKind, Extent, Storage, tar_exact_size, tar_header_into, tar_padding_into,
    tar_trailer_into,
};
use forebay_protocol::batch::CUT_NAME;
use futures::{
    StreamExt,
    stream::{self, BoxStream},
};
use http::{HeaderValue, Method, Response, header};
use regex_automata::{meta, nfa::thompson::WhichCaptures, util::syntax};
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::{Semaphore, oneshot},
    time::timeout,
};
use tokio_util::task::AbortOnDropHandle;

/// The longest pattern: as long as the longest name.
const PATTERN_MAX_BYTES: usize = limits::MEMBER_NAME_MAX_BYTES;
/// The largest size of a compiled regular expression: the time for each name grows with it.
const REGEX_MAX_BYTES: usize = 256 << 10;
/// The pause before a member that the node had no room for is tried again: twice as long each
/// time.
const PAUSE_FIRST: Duration = Duration::from_millis(20);
/// Searches that run at a time; others wait. They share their threads with what reads the disk.
const SEARCHES_MAX: usize = 4;

static SEARCHES: Semaphore = Semaphore::const_new(SEARCHES_MAX);

/// A pattern as it stands in a request.
pub struct Asked {
    mode: Option<String>,
    pattern: String,
}

impl Asked {
    /// The pattern of a request, if it has one.
    pub fn of(call: &Call) -> Result<Option<Self>> {
        let text = |name| call.query(name).filter(|v| !v.is_empty());
        let (pattern, mode) = (text("archregx"), text("archmode"));
        if pattern.is_none() && mode.is_none() {
            return Ok(None);
        }
        if text("archpath").is_some() {
            return Err(Error::invalid(
                "archpath, which names one member, and archregx with archmode, which select \
                 several, exclude each other",
            ));
        }
        let pattern = pattern.unwrap_or_default();
        check_length(pattern)?;
        Ok(Some(Asked {
            mode: mode.map(str::to_owned),
            pattern: pattern.to_owned(),
        }))
    }
}

fn check_length(pattern: &str) -> Result<()> {
    if pattern.len() > PATTERN_MAX_BYTES {
        return Err(Error::invalid(format!(
            "archregx has {} bytes; the limit is {PATTERN_MAX_BYTES}",
            pattern.len()
        )));
    }
    Ok(())
}

/// Which members are wanted, by their names as the archive has them.
enum Pattern {
    All,
    Regexp(Box<meta::Regex>),
    Prefix(String),
    Suffix(String),
    Substr(String),
    /// The name without its last extension and a leading slash: what AIStore treats as WebDataset's
    /// key.
    WdsKey(String),
}

impl Pattern {
    /// Compiles the pattern, which may take a while.
    fn new(mode: Option<&str>, pattern: &str) -> Result<Self> {
        let text = || pattern.to_owned();
        let pattern = match mode {
            None | Some("regexp") => Pattern::Regexp(Box::new(regex(pattern)?)),
            Some("prefix") => Pattern::Prefix(text()),
            Some("suffix") => Pattern::Suffix(text()),
            Some("substr") => Pattern::Substr(text()),
            Some("wdskey") => Pattern::WdsKey(text()),
            Some(other) => {
                return Err(Error::invalid(format!(
                    "archmode is {:?}, which is not known",
                    shorten(other)
                ))
                .hint("use regexp, prefix, suffix, substr or wdskey"));
            }
        };
        Ok(match pattern.text().is_some_and(str::is_empty) {
            true => Pattern::All,
            false => pattern,
        })
    }

    fn text(&self) -> Option<&str> {
        match self {
            Pattern::All | Pattern::Regexp(_) => None,
            Pattern::Prefix(t) | Pattern::Suffix(t) | Pattern::Substr(t) | Pattern::WdsKey(t) => {
                Some(t)
            }
        }
    }

    fn matches(&self, name: &str) -> bool {
        match self {
            Pattern::All => true,
            Pattern::Regexp(regex) => regex.is_match(name),
            Pattern::Prefix(t) => name.starts_with(t.as_str()),
            Pattern::Suffix(t) => name.ends_with(t.as_str()),
            Pattern::Substr(t) => name.contains(t.as_str()),
            Pattern::WdsKey(t) => key_of(name) == t,
        }
    }
}

/// `dir/a.seg.png`: `dir/a.seg`.
fn key_of(name: &str) -> &str {
    let base = name.rfind('/').map_or(0, |slash| slash + 1);
    let end = name[base..].rfind('.').map_or(name.len(), |dot| base + dot);
    let key = &name[..end];
    key.strip_prefix('/').unwrap_or(key)
}

/// # Errors
/// `Invalid` for one that cannot be parsed, or takes too much memory.
// The library's error type is this large.
#[allow(clippy::result_large_err)]
fn regex(pattern: &str) -> Result<meta::Regex> {
    let build = |unicode: bool| {
        let config = meta::Config::new()
            .nfa_size_limit(Some(REGEX_MAX_BYTES))
            .which_captures(WhichCaptures::None);
        meta::Builder::new()
            .configure(config)
            .syntax(syntax::Config::new().unicode(unicode).utf8(unicode))
            .build(pattern)
    };
    let failed = |e: meta::BuildError| {
        let why = match e.syntax_error() {
            // The lines before the last one draw the pattern.
            Some(e) => {
                let text = e.to_string();
                let last = text.lines().last().unwrap_or_default().trim();
                last.trim_start_matches("error: ").to_owned()
            }
            None if e.size_limit().is_some() => {
                format!("compiled, it takes more than {REGEX_MAX_BYTES} bytes")
            }
            None => e.to_string(),
        };
        Error::invalid(format!(
            "archregx is not a regular expression that can be used: {}",
            shorten(&why)
        ))
        .hint("for plain text use archmode=prefix, suffix or substr")
    };
    match build(true) {
        // What remains needs Unicode tables that are not compiled in: `\b`. As in AIStore, words
        // then consist of ASCII characters.
        Err(e) if e.syntax_error().is_none() && e.size_limit().is_none() => {
            build(false).map_err(failed)
        }
        built => built.map_err(failed),
    }
}

/// The matching members of one version of an archive.
struct Chosen {
    name: ObjectName,
    meta: Arc<ObjectMeta>,
    /// In the archive's order. (The index that they come from may hold millions.)
    members: Vec<Member>,
    /// The size of the tar with these members.
    bytes: u64,
}

/// What is known of one of them: it is not looked up again.
struct Member {
    name: Box<str>,
    extent: Extent,
    mtime_secs: i64,
}

impl Chosen {
    fn member(&self, at: usize) -> Result<&Member> {
        self.members
            .get(at)
            .ok_or_else(|| Error::internal("there is no such member"))
    }

    /// How much memory this takes.
    fn memory_bytes(&self) -> u64 {
        let one = |m: &Member| (size_of::<Member>() + m.name.len()) as u64;
        self.members.iter().map(one).sum()
    }

    fn is_here(&self, member: &Member, engine: &Engine) -> bool {
        engine.has_member_of_version(&self.name, &self.meta, &member.extent)
    }
}

/// Answers with the matching members. The sender is allowed to read the archive.
pub async fn matching(
    call: &Call,
    name: &ObjectName,
    asked: Asked,
) -> Result<Response<AnswerBody>> {
    if call.headers.contains_key(header::RANGE) {
        return Err(
            Error::unsupported("a range of several members is not offered here")
                .hint("leave Range out, or read the members one by one with archpath"),
        );
    }
    let engine = &call.app.engine;
    let config = call.app.batcher.config();
    let archive = engine.archive(name, &options(call)).await?;
    let (meta, known) = (archive.meta.clone(), archive.cache);
    let (chosen, here) = choose(
        engine.clone(),
        name.clone(),
        archive,
        asked,
        config.max_entries,
    )
    .await?;
    // The header applies to all bytes of the answer.
    let cache = match known {
        CacheStatus::Hit if !here => CacheStatus::Miss,
        known => known,
    };
    let length = chosen.bytes;
    let body = if call.note.method == Method::HEAD {
        None
    } else {
        let memory = engine
            .budget()
            .try_hold(config.window_bytes() + 2 * CHUNK_BYTES + chosen.memory_bytes())
            .map_err(|e| e.context("the members were refused before the first of them"))?;
        let tar = Tar::new(engine.clone(), chosen, config, memory);
        Some(tar.stream().await?)
    };
    let mut response = match body {
        Some(body) => object::streamed(body, length, cache, &call.note),
        None => {
            let mut head = object::streamed(stream::empty().boxed(), 0, cache, &call.note);
            head.headers_mut()
                .insert(header::CONTENT_LENGTH, HeaderValue::from(length));
            head
        }
    };
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/x-tar"),
    );
    set(
        headers,
        "last-modified",
        &object::http_date(meta.last_modified_ms),
    );
    identify(call, name, headers);
    Ok(response)
}

/// Searches for the members on a blocking thread, since there may be millions. Also returns whether
/// all of them are on the local disk.
async fn choose(
    engine: Engine,
    name: ObjectName,
    archive: Archive,
    asked: Asked,
    most: usize,
) -> Result<(Chosen, bool)> {
    let place = SEARCHES
        .acquire()
        .await
        .map_err(|_| Error::internal("no search is possible any more"))?;
    let (done, chosen) = oneshot::channel();
    tokio::task::spawn_blocking(move || {
        let _place = place;
        let kind = archive.members.kind();
        let unpacked = matches!(kind, ArchiveKind::TarGz | ArchiveKind::TarLz4);
        let found = Pattern::new(asked.mode.as_deref(), &asked.pattern).and_then(|pattern| {
            if unpacked && !engine.keeps_own(&name) {
                return Err(Error::unsupported(format!(
                    "{name} is compressed, and this node does not keep what it unpacks to: each \
                     member would be fetched and unpacked by itself"
                ))
                .hint("give the node a cache, or read the archive as a whole"));
            }
            let counts = engine.repeated_members(&name);
            let chosen = look(name, archive, &pattern, counts, most, || done.is_closed())?;
            let is_here = |m: &Member| chosen.is_here(m, &engine) && !done.is_closed();
            let here = chosen.members.iter().all(is_here);
            Ok((chosen, here))
        });
        let _ = done.send(found);
    });
    chosen
        .await
        .unwrap_or_else(|_| Err(Error::internal("the members could not be looked for")))
}

fn look(
    name: ObjectName,
    Archive { meta, members, .. }: Archive,
    pattern: &Pattern,
    counts: Repeated,
    most: usize,
    is_given_up: impl Fn() -> bool,
) -> Result<Chosen> {
    let mut chosen = Vec::new();
    for member in members.iter() {
        if is_given_up() {
            return Err(Error::internal("nobody waits for the members any more"));
        }
        // A repeated name means the member that counts, as with archpath.
        if member.extent.storage == Storage::Directory
            || !pattern.matches(member.name)
            || members.get_by(member.name, counts).map(|m| m.number) != Some(member.number)
        {
            continue;
        }
        member.readable().map_err(|e| e.context(&name))?;
        if chosen.len() == most {
            return Err(Error::new(
                ErrorKind::TooLarge,
                format!("{name}: more members match than batch.max_entries = {most}"),
            )
            .hint("use a pattern that fewer names match"));
        }
        chosen.push(Member {
            name: member.name.into(),
            extent: member.extent,
            mtime_secs: member.mtime_secs,
        });
    }
    if chosen.is_empty() {
        return Err(Error::not_found(format!(
            "none of the {} members of {name} matches archregx",
            members.len()
        )));
    }
    let bytes = tar_exact_size(
        chosen
            .iter()
            .map(|m| (&*m.name, m.extent.size, m.mtime_secs)),
    )?;
    Ok(Chosen {
        name,
        meta,
        members: chosen,
        bytes,
    })
}

/// The tar while it is sent.
struct Tar {
    engine: Engine,
    chosen: Arc<Chosen>,
    /// How each member came to the local disk, if it had to be fetched; in order.
    ahead: BoxStream<'static, Option<CacheStatus>>,
    next: usize,
    /// The member at the cursor once its header is sent, and how many of its bytes are left.
    member: Option<(ByteStream, u64)>,
    out: Vec<u8>,
    frame_bytes: usize,
    attempts: u32,
    entry_timeout: Duration,
    is_complete: bool,
    failed: Option<Error>,
    _memory: Reservation,
}

impl Tar {
    fn new(engine: Engine, chosen: Chosen, config: &BatchConfig, memory: Reservation) -> Self {
        let chosen = Arc::new(chosen);
        Self {
            ahead: ahead(engine.clone(), chosen.clone(), config.read_ahead_entries),
            engine,
            chosen,
            next: 0,
            member: None,
            out: Vec::new(),
            frame_bytes: config.frame_bytes,
            attempts: config.attempts.max(1),
            entry_timeout: config.entry_timeout,
            is_complete: false,
            failed: None,
            _memory: memory,
        }
    }

    /// The first bytes are ready when this returns, so an error before them is returned here.
    async fn stream(mut self) -> Result<ByteStream> {
        self.fill().await?;
        let frames = stream::unfold(self, |mut tar| async move {
            let frame = tar.frame().await.transpose()?;
            Some((frame, tar))
        });
        Ok(frames.boxed())
    }

    async fn frame(&mut self) -> Result<Option<Bytes>> {
        if let Some(e) = self.failed.take() {
            // What was ready is sent before the connection is broken off.
            tokio::task::yield_now().await;
            return Err(e);
        }
        // The first frame is already there.
        if self.out.is_empty()
            && let Err(e) = self.fill().await
        {
            // A tar that ends between two entries could pass for a complete one.
            let within = self.member.as_ref().is_some_and(|(_, left)| *left > 0);
            if !within {
                if self.member.is_some() {
                    tar_padding_into(&mut self.out, self.chosen.member(self.next)?.extent.size);
                }
                tar_header_into(&mut self.out, CUT_NAME, 512, 0)?;
            }
            if self.out.is_empty() {
                return Err(e);
            }
            self.failed = Some(e);
        }
        let frame = std::mem::take(&mut self.out);
        Ok((!frame.is_empty()).then(|| frame.into()))
    }

    /// Continues until there is a full frame, or nothing is left.
    async fn fill(&mut self) -> Result<()> {
        while self.out.len() < self.frame_bytes {
            if let Some((body, left)) = &mut self.member {
                let size = self.chosen.member(self.next)?.extent.size;
                match body.next().await.transpose()? {
                    Some(piece) => {
                        *left = left
                            .checked_sub(piece.len() as u64)
                            .ok_or_else(|| self.chosen.differs(self.next))?;
                        self.out.extend_from_slice(&piece);
                    }
                    None if *left > 0 => return Err(self.chosen.differs(self.next)),
                    None => {
                        tar_padding_into(&mut self.out, size);
                        self.member = None;
                        self.next += 1;
                    }
                }
            } else if self.next < self.chosen.members.len() {
                self.open().await?;
            } else if !self.is_complete {
                tar_trailer_into(&mut self.out);
                self.is_complete = true;
            } else {
                break;
            }
        }
        Ok(())
    }

    /// Begins the member at the cursor. As an entry of a batch, it is tried again where the node had
    /// no room for it; failures of the way to the origin are made good there.
    async fn open(&mut self) -> Result<()> {
        let brought = self.ahead.next().await.flatten();
        let (chosen, engine) = (self.chosen.clone(), &self.engine);
        let member = chosen.member(self.next)?;
        let (most, mut made) = (self.attempts, 1);
        let attempts = async {
            loop {
                match chosen.read(engine, member, brought).await {
                    Err(e) if e.kind() == ErrorKind::Busy && made < most => {
                        tokio::time::sleep(PAUSE_FIRST * (1 << made.min(6))).await;
                        made += 1;
                    }
                    done => return done,
                }
            }
        };
        let body = match timeout(self.entry_timeout, attempts).await {
            Ok(read) => read?,
            Err(_) => {
                let what = format!("no answer in {:?}", self.entry_timeout);
                return Err(Error::timeout(what).hint("batch.entry_timeout sets the limit"));
            }
        };
        let size = member.extent.size;
        tar_header_into(&mut self.out, &member.name, size, member.mtime_secs)?;
        self.member = Some((body, size));
        Ok(())
    }
}

impl Chosen {
    async fn read(
        &self,
        engine: &Engine,
        member: &Member,
        brought: Option<CacheStatus>,
    ) -> Result<ByteStream> {
        let options = ReadOptions {
            brought,
            ..ReadOptions::default()
        };
        let which = (&*member.name, &member.extent);
        let read = engine
            .read_member_of_version(&self.name, &self.meta, which, None, &options)
            .await;
        match read {
            Ok(read) => Ok(read.body),
            Err(e) if e.kind() == ErrorKind::VersionChanged => Err(e
                .context(format_args!(
                    "{} was replaced while its members were being read",
                    self.name
                ))
                .hint("send the request again")),
            Err(e) => Err(e),
        }
    }

    fn differs(&self, at: usize) -> Error {
        let member = self.member(at).map_or("", |m| &*m.name);
        Error::internal(format!(
            "{}/{}: it has not the length that the index says",
            self.name,
            shorten(member)
        ))
    }
}

/// Brings members to the local disk, some way ahead. Each has a task of its own: a future that is
/// not polled while the node waits for the client would keep what it was just given. What fails
/// here fails again when the member is read, and is reported then.
fn ahead(
    engine: Engine,
    chosen: Arc<Chosen>,
    entries: usize,
) -> BoxStream<'static, Option<CacheStatus>> {
    stream::iter(0..chosen.members.len())
        .map(move |at| {
            let (engine, chosen) = (engine.clone(), chosen.clone());
            let bring = AbortOnDropHandle::new(request::spawn(async move {
                let member = chosen.member(at).ok()?;
                if !engine.keeps_own(&chosen.name) || chosen.is_here(member, &engine) {
                    return None;
                }
                let Chosen { name, meta, .. } = &*chosen;
                let brought = engine.bring_member_of_version(name, meta, &member.extent);
                brought.await.ok()
            }));
            async move { bring.await.ok().flatten() }
        })
        .buffered(entries.max(1))
        .boxed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_format::{ArchiveKind, Extent, MemberIndexBuilder};

    fn archive(members: &[(&str, Storage)]) -> Archive {
        let mut index = MemberIndexBuilder::new(ArchiveKind::Tar, 1 << 20);
        for (at, (name, storage)) in members.iter().enumerate() {
            let extent = Extent {
                kind: ArchiveKind::Tar,
                storage: *storage,
                offset: 512 * (2 * at as u64 + 1),
                size: 3,
                stored_size: 3,
                crc32: None,
                bound: 1 << 20,
            };
            index.push(name, 7, &extent).unwrap();
        }
        Archive {
            meta: Arc::new(ObjectMeta {
                size: 1 << 20,
                etag: None,
                last_modified_ms: 0,
                attributes: Default::default(),
            }),
            members: Arc::new(index.finish()),
            cache: CacheStatus::Hit,
        }
    }

    fn looked(members: &[(&str, Storage)], prefix: &str, most: usize) -> Result<Chosen> {
        looked_by(members, prefix, Repeated::Last, most)
    }

    fn looked_by(
        members: &[(&str, Storage)],
        prefix: &str,
        counts: Repeated,
        most: usize,
    ) -> Result<Chosen> {
        let name = ObjectName::new("data", "a.tar").unwrap();
        let pattern = Pattern::Prefix(prefix.to_owned());
        look(name, archive(members), &pattern, counts, most, || false)
    }

    #[test]
    fn members_are_files_and_the_last_of_their_name() {
        let members = [
            ("x", Storage::Stored),
            ("dir/", Storage::Directory),
            ("y", Storage::Stored),
            ("./x", Storage::Stored),
            ("link", Storage::SymbolicLink),
        ];
        let names = |chosen: Chosen| -> Vec<String> {
            chosen.members.iter().map(|m| m.name.to_string()).collect()
        };
        let numbers = |prefix, most| looked(&members, prefix, most).map(names);
        assert_eq!(numbers("y", 9).unwrap(), ["y"]);
        assert_eq!(numbers("./", 9).unwrap(), ["./x"]);
        let kind = |prefix, most| numbers(prefix, most).unwrap_err().kind();
        // Shadowed, a directory, missing.
        for none in ["x", "dir", "z"] {
            assert_eq!(kind(none, 9), ErrorKind::NotFound, "{none}");
        }
        // A member that cannot be read is not silently left out.
        assert_eq!(kind("link", 9), ErrorKind::Unsupported);
        assert_eq!(kind("", 9), ErrorKind::Unsupported);
        let files = &members[..4];
        assert_eq!(names(looked(files, "", 2).unwrap()), ["y", "./x"]);
        let firsts = looked_by(files, "", Repeated::First, 2);
        assert_eq!(names(firsts.unwrap()), ["x", "y"]);
        let e = looked(files, "", 1).err().unwrap();
        assert!(e.kind() == ErrorKind::TooLarge && e.to_string().contains("batch.max_entries = 1"));
        assert_eq!(looked(files, "y", 2).unwrap().bytes, 512 + 512 + 1024);
    }

    #[test]
    fn a_search_stops_when_nobody_waits_for_it() {
        let name = ObjectName::new("data", "a.tar").unwrap();
        let members = archive(&[("x", Storage::Stored)]);
        let counts = Repeated::Last;
        assert!(look(name, members, &Pattern::All, counts, 9, || true).is_err());
    }

    fn matching(mode: Option<&str>, pattern: &str) -> Vec<&'static str> {
        let names = [
            "a/000.jpg",
            "a/000.seg.png",
            "a/001.jpg",
            "/a/002.cls",
            "a.b/003",
            "ü.jpg",
        ];
        let pattern = Pattern::new(mode, pattern).unwrap();
        names.into_iter().filter(|n| pattern.matches(n)).collect()
    }

    #[test]
    fn modes() {
        let all = matching(Some("prefix"), "");
        assert_eq!(all.len(), 6);
        assert_eq!(matching(Some("regexp"), ""), all);
        assert_eq!(
            matching(Some("prefix"), "a/000."),
            ["a/000.jpg", "a/000.seg.png"]
        );
        assert_eq!(
            matching(Some("suffix"), ".jpg"),
            ["a/000.jpg", "a/001.jpg", "ü.jpg"]
        );
        assert_eq!(matching(Some("substr"), "0.s"), ["a/000.seg.png"]);
        assert_eq!(matching(Some("wdskey"), "a/000"), ["a/000.jpg"]);
        assert_eq!(matching(Some("wdskey"), "a/000.seg"), ["a/000.seg.png"]);
        assert_eq!(matching(Some("wdskey"), "a/002"), ["/a/002.cls"]);
        assert_eq!(matching(Some("wdskey"), "a.b/003"), ["a.b/003"]);
        for mode in [None, Some("regexp")] {
            assert_eq!(
                matching(mode, r"^a/\d+\.(jpg|png)$"),
                ["a/000.jpg", "a/001.jpg"]
            );
            assert_eq!(matching(mode, r"\bseg\b"), ["a/000.seg.png"]);
            assert_eq!(matching(mode, r"^\p{L}\.jpg"), ["ü.jpg"]);
        }
    }

    #[test]
    fn an_invalid_pattern_is_refused_with_the_reason() {
        let failed = |mode, pattern: &str| {
            let e = Pattern::new(mode, pattern).err().expect(pattern);
            assert_eq!(e.kind(), ErrorKind::Invalid);
            e.to_string()
        };
        assert!(failed(None, "a(b").contains("unclosed group"));
        assert!(failed(None, r"((\w{100}){100}){100}").contains("more than 262144 bytes"));
        assert!(failed(Some("glob"), "x").contains("\"glob\""));
        let long = check_length(&"x".repeat(5000)).unwrap_err();
        assert!(long.to_string().contains("5000 bytes"), "{long}");
        assert!(check_length("x").is_ok());
    }
}
