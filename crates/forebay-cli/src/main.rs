//! The binary: the command line of [`forebay_cli`].

fn main() {
    // A file that would be larger than this process may write (`ulimit -f`) is an error, as a full disk
    // is, and not the end of the process. (The wheel's console script has it so from Python.)
    // SAFETY: setting a disposition is safe at any time.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    std::process::exit(forebay_cli::main_from(std::env::args_os()));
}
