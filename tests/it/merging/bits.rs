//! The same recipe gives the same bits: with any number of threads and any size of pieces.

use std::collections::BTreeMap;
use std::fs;

use super::{merge, place};
use crate::support::Place;

/// Methods of every kind, with flags that let all their reads happen.
const METHODS: [&str; 9] = [
    "--method ties --density 0.4 --weight 0.6,0.4 --lambda 1.1",
    "--method ties --density 0.4 --trim-scope model --rescale true",
    "--method ties --density 0.4 --semantics paper --trim-scope layer",
    "--method dare_ties --density 0.3",
    "--method della --density 0.5,0.6",
    "--method breadcrumbs --density 0.6 --gamma 0.05",
    "--method model_stock",
    "--method linear --weight 0.3,0.9",
    "--method task_arithmetic --weight 0.5 --out-dtype f32",
];

/// All files of the merged model.
fn model(place: &Place, name: &str) -> BTreeMap<String, Vec<u8>> {
    let folder = format!("{name}/model");
    let names = place.names(&folder).into_iter();
    names
        .map(|file| {
            let bytes = fs::read(place.path(&folder).join(&file)).expect("listed above");
            (file, bytes)
        })
        .collect()
}

#[test]
fn threads_and_pieces_do_not_change_a_bit() {
    let place = place(2);
    for method in METHODS {
        let mut first = None;
        for (number, flags) in [
            "--threads 1",
            "--threads 8",
            // A row, some rows, and odd numbers of rows.
            "--threads 8 --piece-elements 1",
            "--threads 2 --piece-elements 200",
            "--threads 2 --piece-elements 7000",
        ]
        .iter()
        .enumerate()
        {
            let out = format!("out{number}");
            merge(
                &place,
                &format!("--base m --model e1 --model e2 {method} {flags} --force --save {out}"),
            );
            let model = model(&place, &out);
            assert!(model.len() > 3, "{:?}", model.keys());
            let first = first.get_or_insert_with(|| model.clone());
            assert!(*first == model, "{method}: {flags} writes another model");
        }
    }
}

#[test]
fn the_seed_decides_random_masks() {
    let place = place(1);
    let mut weights = Vec::new();
    for seed in [0, 0, 1] {
        merge(
            &place,
            &format!(
                "--base m --model e1 --method dare_linear --density 0.5 --seed {seed} --force --save out"
            ),
        );
        let mut files = model(&place, "out");
        files.retain(|name, _| name.ends_with(".safetensors"));
        weights.push(files);
    }
    assert!(weights[0] == weights[1] && weights[0] != weights[2]);
}

#[test]
fn weights_that_are_zero_in_every_model_stay_zero_if_asked() {
    let place = place(1);
    for name in ["m", "e1"] {
        place.prune(&format!(
            "--model {name} --prune-method magnitude --sparsity-type 2:4 --eval none --save {name}-sparse"
        ));
    }
    // A random mask of its own keeps zeros of both; the norms of slerp move none away from zero either, so the sum decides.
    let line = "--base m-sparse/model --model e1-sparse/model --method slerp --t 0.5";
    merge(&place, &format!("{line} --save plain"));
    merge(&place, &format!("{line} --keep-zeros --save kept"));
    let report = |name: &str| place.manifest(name).merge.expect("a merge");
    let (plain, kept) = (report("plain"), report("kept"));
    for (plain, kept) in plain.tensors.iter().zip(&kept.tensors) {
        assert_eq!(plain.kept_zeros, None);
        let zeros = kept.kept_zeros.expect("counted");
        assert!(zeros <= kept.zeros && kept.zeros >= plain.zeros, "{kept:?}");
        // Two masks of one half share about a quarter of the entries.
        let elements: usize = kept.shape.iter().product();
        if kept.name.ends_with("_proj.weight") {
            let share = zeros as f64 / elements as f64;
            assert!((0.2..0.3).contains(&share), "{}: {share}", kept.name);
        }
    }
}
