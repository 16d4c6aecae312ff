//! Certificates from a CA of a test's own, by the `openssl` command.

use std::{path::Path, process::Command};

fn openssl(dir: &Path, arguments: &str) {
    let made = Command::new("openssl")
        .current_dir(dir)
        .args(arguments.split(' '))
        .output()
        .expect("openssl is installed");
    assert!(made.status.success(), "openssl {arguments}: {made:?}");
}

const NEW_KEY: &str = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";

/// Makes `NAME.pem` and `NAME.key`, a CA of this name.
pub fn authority(dir: &Path, name: &str) {
    openssl(
        dir,
        &format!(
            "req -x509 {NEW_KEY} -days 2 -subj /CN={name} -keyout {name}.key -out {name}.pem \
             -addext keyUsage=critical,keyCertSign"
        ),
    );
}

/// Makes `NAME.pem` and `NAME.key`, a certificate for the host name `host` from this CA.
pub fn certified(dir: &Path, name: &str, host: &str, authority: &str) {
    std::fs::write(
        dir.join("extensions"),
        format!("subjectAltName=DNS:{host}\nbasicConstraints=critical,CA:FALSE\n"),
    )
    .unwrap();
    openssl(
        dir,
        &format!("req -new {NEW_KEY} -subj /CN={name} -keyout {name}.key -out {name}.csr"),
    );
    openssl(
        dir,
        &format!(
            "x509 -req -in {name}.csr -CA {authority}.pem -CAkey {authority}.key -CAcreateserial \
             -days 2 -extfile extensions -out {name}.pem"
        ),
    );
}
