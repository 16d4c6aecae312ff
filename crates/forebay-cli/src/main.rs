//! The binary: the command line of [`forebay_cli`].

fn main() {
    std::process::exit(forebay_cli::main_from(std::env::args_os()));
}
