//! The binary: the command line of [`forebay_cli`] with mimalloc under it.

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    std::process::exit(forebay_cli::main_from(std::env::args_os()));
}
