//! The Unix socket. Its permissions are right before anybody can open it, and it replaces one that
//! a dead process left behind.

use forebay_core::{Error, ErrorKind, Result};
use std::{
    fs,
    os::unix::{
        fs::{FileTypeExt, PermissionsExt},
        net::UnixStream,
    },
    path::Path,
};
use tokio::net::UnixListener;

/// Refuses a path at which there is something else than a socket, which would be replaced.
///
/// # Errors
/// `Invalid`, with what to do.
pub fn check_place(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => Err(Error::invalid(format!(
            "listen.unix: {} exists and is not a socket",
            path.display()
        ))
        .hint("choose another path")),
        _ => Ok(()),
    }
}

/// Listens at `path`. The socket is created under another name, given its mode, and then moved into
/// place.
pub fn bind(path: &Path, mode: u32) -> Result<UnixListener> {
    let failed = |e: std::io::Error| {
        let kind = if e.kind() == std::io::ErrorKind::PermissionDenied {
            ErrorKind::PermissionDenied
        } else {
            ErrorKind::Invalid
        };
        Error::new(
            kind,
            format!("listen.unix: cannot listen on {}: {e}", path.display()),
        )
        .hint("set listen.unix to a path in a directory of yours, or to \"off\"")
    };
    check_place(path)?;
    if UnixStream::connect(path).is_ok() {
        return Err(Error::new(
            ErrorKind::AlreadyExists,
            format!("listen.unix: another process listens on {}", path.display()),
        )
        .hint("stop it, or choose another path"));
    }
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(failed)?;
    }
    let mut new = path.as_os_str().to_owned();
    new.push(format!(".{}", std::process::id() % 100_000));
    let new = Path::new(&new);
    let _ = fs::remove_file(new);
    let listener = UnixListener::bind(new).map_err(failed)?;
    let placed = fs::set_permissions(new, fs::Permissions::from_mode(mode))
        .and_then(|()| fs::rename(new, path));
    if let Err(e) = placed {
        let _ = fs::remove_file(new);
        return Err(failed(e));
    }
    Ok(listener)
}

/// Removes the file at `path` if it is a socket.
pub fn remove(path: &Path) {
    if fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket()) {
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_is_private_and_a_stale_one_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f.sock");
        let listener = bind(&path, 0o600).unwrap();
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert_eq!(
            bind(&path, 0o600).unwrap_err().kind(),
            ErrorKind::AlreadyExists
        );
        drop(listener);
        assert!(path.exists(), "as after kill -9");
        let _listener = bind(&path, 0o660).unwrap();
        assert!(UnixStream::connect(&path).is_ok());
        remove(&path);
        assert!(!path.exists());
        fs::write(&path, "x").unwrap();
        assert!(bind(&path, 0o600).is_err());
        remove(&path);
        assert!(path.exists(), "a file that is not a socket is left alone");
    }
}
