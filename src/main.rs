//! The binary: hands its arguments to the library.

fn main() {}
