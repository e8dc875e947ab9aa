//! Tests of the room: the recorded curves of the reference, and what may change no bit.

mod bits;
mod blocks;
mod closing;
mod curves;
mod distill;
mod fixture;
mod store;
