//! `credential_process`: a command that prints keys as JSON. Bounded in time and output; when it is
//! stopped, the processes it started are stopped too.

use super::renewed::{Fetched, Source};
use async_trait::async_trait;
use chrono::Utc;
use forebay_core::{Error, Result};
use std::{process::Stdio, time::Duration};
use tokio::io::{AsyncRead, AsyncReadExt};

const TIMEOUT: Duration = Duration::from_secs(30);
const OUTPUT_MAX_BYTES: u64 = 64 << 10;
/// Keys without an expiry are asked for again after this.
const TTL: chrono::Duration = chrono::Duration::seconds(300);

pub(crate) struct Process {
    command: String,
    timeout: Duration,
}

/// Ends a process and its children.
struct Group(Option<i32>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(id) = self.0 {
            // SAFETY: a plain system call. The group was made for this command, whose leader has
            // not been waited for.
            unsafe { libc::kill(-id, libc::SIGKILL) };
        }
    }
}

async fn all(stream: Option<impl AsyncRead + Unpin>) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(stream) = stream {
        stream
            .take(OUTPUT_MAX_BYTES + 1)
            .read_to_end(&mut bytes)
            .await?;
    }
    Ok(bytes)
}

impl Process {
    pub(crate) fn new(command: String) -> Self {
        Self {
            command,
            timeout: TIMEOUT,
        }
    }
}

#[async_trait]
impl Source for Process {
    fn describe(&self) -> String {
        "credential_process".to_owned()
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    async fn fetch(&self) -> Result<Fetched> {
        let failed = |text: String| {
            Error::permission_denied(format!("credential_process: {text}"))
                .hint("run the command by hand as the node's user")
        };
        let mut child = tokio::process::Command::new("/bin/sh")
            .arg("-c")
            .arg(&self.command)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| failed(e.to_string()))?;
        let mut group = Group(child.id().and_then(|id| i32::try_from(id).ok()));
        let (printed, complaint) =
            tokio::try_join!(all(child.stdout.take()), all(child.stderr.take()))
                .map_err(|e| failed(e.to_string()))?;
        if printed.len() as u64 > OUTPUT_MAX_BYTES {
            return Err(failed(format!(
                "it printed more than {OUTPUT_MAX_BYTES} bytes"
            )));
        }
        let status = child.wait().await.map_err(|e| failed(e.to_string()))?;
        // It has been waited for: its number may now belong to another process.
        group.0 = None;
        if !status.success() {
            let why = String::from_utf8_lossy(&complaint);
            return Err(failed(format!(
                "{status}: {}",
                why.trim()
                    .chars()
                    .filter(|c| !c.is_control())
                    .take(300)
                    .collect::<String>()
            )));
        }
        let mut fetched =
            Fetched::from_json("credential_process", &String::from_utf8_lossy(&printed))?;
        fetched.ends.get_or_insert_with(|| Utc::now() + TTL);
        Ok(fetched)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::renewed::Renewed, *};
    use crate::aws::Credentials;

    #[tokio::test]
    async fn a_credential_process_is_run_once_while_it_lasts() {
        let dir = tempfile::tempdir().unwrap();
        let count = dir.path().join("count");
        let command = format!(
            r#"echo x >> {}; echo '{{"Version":1,"AccessKeyId":"A","SecretAccessKey":"B"}}'"#,
            count.display()
        );
        let p = Credentials::Renewed(Renewed::new(Process::new(command)));
        assert_eq!(p.get().await.unwrap().key_id, "A");
        assert_eq!(p.get().await.unwrap().secret_key, "B");
        assert_eq!(std::fs::read_to_string(count).unwrap(), "x\n");
        assert!(
            Process::new("exit 3".into())
                .fetch()
                .await
                .err()
                .unwrap()
                .to_string()
                .contains("exit status: 3")
        );
        assert!(
            Process::new("echo hunter2".into())
                .fetch()
                .await
                .err()
                .is_some_and(|e| !e.to_string().contains("hunter2"))
        );
        let long = Process::new("yes".into()).fetch().await.err().unwrap();
        assert!(long.to_string().contains("more than 65536 bytes"), "{long}");
    }

    #[tokio::test]
    async fn a_credential_process_that_hangs_is_ended_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let pid = dir.path().join("pid");
        let command = format!("sleep 100 & echo $! > {}; wait", pid.display());
        let p = Credentials::Renewed(Renewed::new(Process {
            command,
            timeout: Duration::from_secs(3),
        }));
        let e = p.get().await.unwrap_err();
        assert!(
            e.to_string()
                .contains("credential_process: no answer within 3s"),
            "{e}"
        );
        let child = std::fs::read_to_string(pid).unwrap();
        // A process that has ended may be a zombie until its parent, or init, reaps it.
        let alive = || {
            std::fs::read_to_string(format!("/proc/{}/stat", child.trim()))
                .is_ok_and(|s| !s.contains(") Z "))
        };
        for _ in 0..3000 {
            if !alive() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("the child lives on");
    }
}
