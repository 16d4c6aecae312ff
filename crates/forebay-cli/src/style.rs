//! Colours, only on a terminal. `NO_COLOR` (with any value that is not empty) and `TERM=dumb` turn
//! them off.

use std::io::IsTerminal;

/// Whether to use colours, decided once per stream.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    on: bool,
}

impl Style {
    #[cfg(test)]
    pub const PLAIN: Style = Style { on: false };

    pub fn stdout() -> Self {
        Self {
            on: std::io::stdout().is_terminal() && wanted(),
        }
    }

    pub fn stderr() -> Self {
        Self {
            on: std::io::stderr().is_terminal() && wanted(),
        }
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.on {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }

    pub fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    pub fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    pub fn red(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    pub fn green(self, text: &str) -> String {
        self.paint("32", text)
    }

    pub fn yellow(self, text: &str) -> String {
        self.paint("33", text)
    }

    pub fn cyan(self, text: &str) -> String {
        self.paint("36", text)
    }
}

fn wanted() -> bool {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty());
    set("NO_COLOR").is_none() && set("TERM").is_none_or(|t| t != "dumb")
}
