//! Parts of a compact matrix with their zeros: some rows and columns at a time, for products of many tokens.

use std::ops::Range;

use super::{Codes, CompactMatrix, CompactPart, KeptValues};
use crate::linalg::bitmask::{WORD, kept, mask_bytes, scatter};
use crate::linalg::buffer_pool::grow;
use crate::linalg::int8;
use crate::linalg::one_token::{LINE, ask_for};
use crate::linalg::parts::rows_at_once;
use crate::linalg::product::{RestoredWeight, RowBuffer, Values};
use crate::linalg::stored::StoredDtype;

impl CompactMatrix {
    /// Calls `restore` with the part, the row in it and the memory of every row.
    fn for_rows<E>(
        &self,
        rows: Range<usize>,
        out: &mut [E],
        restore: impl Fn(&CompactPart, usize, &mut [E]),
    ) {
        let elements = (out.len() / rows.len().max(1)).max(1);
        for (row, out) in rows.zip(out.chunks_exact_mut(elements)) {
            let (part, row) = self.place_of(row);
            restore(part, row, out);
        }
    }

    /// The part of a row, and the number of the row in it.
    fn place_of(&self, row: usize) -> (&CompactPart, usize) {
        let at_once = rows_at_once(self.columns);
        (&self.parts[row / at_once], row % at_once)
    }
}

impl RestoredWeight for CompactMatrix {
    fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    fn restore<'b>(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        RowBuffer { whole, half }: &'b mut RowBuffer,
    ) -> Values<'b> {
        assert!(rows.end <= self.rows && columns.end <= self.columns, "a part of the matrix");
        assert!(columns.start.is_multiple_of(int8::GROUP), "parts begin with a block of codes");
        let elements = rows.len() * columns.len();
        let first = columns.start;
        // Parts of several rows are too short for a CPU to foresee.
        for (part, row) in rows.clone().map(|row| self.place_of(row)) {
            part.ask_for(row, columns.clone());
        }
        match self.dtype() {
            StoredDtype::F32 => {
                let out = grow(whole, elements);
                self.for_rows(rows, out, |part, row, out| match &part.values {
                    KeptValues::F32(values) => part.restore_row([row, first], values, out),
                    KeptValues::Codes(codes) => part.restore_codes([row, first], codes, out),
                    KeptValues::F16(_) | KeptValues::Bf16(_) => unreachable!("parts share a form"),
                });
                Values::F32(out)
            }
            dtype @ (StoredDtype::F16 | StoredDtype::Bf16) => {
                let out = grow(half, elements);
                self.for_rows(rows, out, |part, row, out| {
                    let values: &[u16] = match &part.values {
                        KeptValues::F16(values) => bytemuck::cast_slice(values),
                        KeptValues::Bf16(values) => bytemuck::cast_slice(values),
                        _ => unreachable!("parts share a form"),
                    };
                    part.restore_row([row, first], values, out);
                });
                match dtype {
                    StoredDtype::F16 => Values::F16(bytemuck::cast_slice(out)),
                    _ => Values::Bf16(bytemuck::cast_slice(out)),
                }
            }
        }
    }
}

impl CompactPart {
    /// Asks for the memory of the values in some columns of a row.
    fn ask_for(&self, row: usize, columns: Range<usize>) {
        let (before, mask) = self.mask(row).split_at(columns.start / WORD);
        let mask = &mask[..columns.len().div_ceil(WORD).min(mask.len())];
        let [before, own] = [before, mask].map(|mask| kept(bytemuck::cast_slice(mask)));
        let (values, each) = self.values.bytes();
        let first = each * (self.start(row) + before);
        values[first..first + each * own].chunks(LINE).for_each(|line| ask_for(line, 0));
    }

    /// The mask of a row in bytes, and its values, both from a column on that is a multiple of 64.
    fn row_from<'v, E: bytemuck::NoUninit>(
        &self,
        [row, column]: [usize; 2],
        values: &'v [E],
    ) -> (&[u8], &'v [u8]) {
        let (before, mask) = self.mask(row).split_at(column / WORD);
        let first = self.start(row) + kept(bytemuck::cast_slice(before));
        let values = &values[first..self.start(row + 1)];
        (bytemuck::cast_slice(mask), bytemuck::cast_slice(values))
    }

    fn restore_row<E: bytemuck::Pod>(&self, at: [usize; 2], values: &[E], out: &mut [E]) {
        let (mask, values) = self.row_from(at, values);
        let mask = &mask[..mask_bytes(out.len())];
        scatter(size_of::<E>(), values, mask, bytemuck::cast_slice_mut(out));
    }

    fn restore_codes(&self, at: [usize; 2], codes: &Codes, out: &mut [f32]) {
        let (mask, values) = self.row_from(at, &codes.values);
        let scales = &codes.scales_of(at[0])[at[1] / int8::GROUP..];
        int8::decode(values, bytemuck::cast_slice(scales), mask, out);
    }
}
