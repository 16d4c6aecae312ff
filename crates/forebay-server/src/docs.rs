//! Checks generated pages in `docs/` against what the program says.

/// `FOREBAY_WRITE_DOCS=1 cargo test --release -p forebay-server docs` writes them anew.
pub fn check(page: &str, text: &str) {
    let path = format!("../../docs/{page}");
    let text = format!("{}\n", text.trim_end());
    if std::env::var_os("FOREBAY_WRITE_DOCS").is_some() {
        std::fs::write(&path, &text).expect("docs can be written");
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == text,
        "docs/{page} is not current: FOREBAY_WRITE_DOCS=1 cargo test --release -p forebay-server \
         docs"
    );
}
