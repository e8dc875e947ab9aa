//! Tests of `permutation.rs`: both steps by hand, choices that keep more, threads, and a time to measure by hand.

use super::*;
use crate::linalg::StoredDtype;
use crate::pruning::{Pattern, Target};

fn matrix(rows: usize, columns: usize) -> StoredMatrix {
    let value = |at: usize| {
        let column = (at % columns) as f32;
        ((at * 7919 % 1009) as f32 / 1009.0 - 0.5) * (1.0 + (column * 0.9).sin().abs() * 4.0)
    };
    let values: Vec<f32> = (0..rows * columns).map(value).collect();
    StoredMatrix::from_f32(StoredDtype::F32, rows, columns, &values)
}

fn request() -> Request<'static> {
    let target = Target { ratio: 0.5, pattern: Pattern::NOfM { n: 2, m: 4 } };
    Request::new("model.layers.0.mlp.down_proj", None, target)
}

fn is_permutation(order: &[usize]) -> bool {
    let mut sorted = order.to_vec();
    sorted.sort_unstable();
    sorted.into_iter().eq(0..order.len())
}

#[test]
fn columns_are_dealt_by_their_sums_in_alternating_direction() {
    // One row: sums are magnitudes. Ascending columns: 3 (1), 0 (2), 5 (3), 1 (4), 4 (5), 2 (6), 7 (7), 6 (8).
    let row = [2.0, -4.0, 6.0, 1.0, -5.0, 3.0, 8.0, 7.0];
    let weight = StoredMatrix::from_f32(StoredDtype::F32, 1, 8, &row);
    let request = request();
    let of_groups = |n, m| ChannelSearch::new(&weight, &request, &|_| (), (n, m));
    let dealt = of_groups(2, 4).deal().unwrap();
    // Parts of two: 3 0 | 1 5 turned | 4 2 | 6 7 turned.
    assert_eq!(dealt, [3, 1, 4, 6, 0, 5, 2, 7]);
    // 5 + 8 and 6 + 7 are kept; before, 4 + 6 and 7 + 8.
    assert_eq!(of_groups(2, 4).kept(&dealt).unwrap(), 26.0);
    assert_eq!(of_groups(2, 4).kept(&Vec::from_iter(0..8)).unwrap(), 25.0);
    assert_eq!(of_groups(1, 2).deal().unwrap(), [3, 6, 0, 7, 5, 2, 1, 4]);
}

#[test]
fn an_assignment_is_the_best_exchange_of_the_columns_at_a_place() {
    let weight = matrix(37, 12);
    let request = request();
    let search = ChannelSearch::new(&weight, &request, &|_| (), (2, 4));
    let start: Vec<usize> = (0..12).collect();
    let mut gains = vec![0.0; 9];
    search.gains(&start, 0, &mut gains).unwrap();
    // The six exchanges of three columns, at the first place of three groups.
    let exchanges = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    let value = |exchange: &[usize; 3]| {
        let mut order = start.clone();
        (0..3).for_each(|group| order[group * 4] = start[exchange[group] * 4]);
        search.kept(&order).unwrap()
    };
    let gain = |exchange: &[usize; 3]| {
        let groups = exchange.iter().enumerate();
        groups.map(|(g, &c)| gains[g * 3 + c]).sum::<f64>()
    };
    // Gains and kept importance differ by a constant, up to f32 sums of 37 rows.
    let constant = value(&exchanges[0]) - gain(&exchanges[0]);
    for exchange in &exchanges {
        let gap = value(exchange) - gain(exchange) - constant;
        assert!(gap.abs() < 1e-4, "{gap}");
    }
    let best = exchanges.iter().map(value).fold(0.0, f64::max);
    let assigned = search.assign(&start).unwrap();
    assert!(is_permutation(&assigned));
    assert!(search.kept(&assigned).unwrap() >= best - 1e-4);
}

#[test]
fn every_step_keeps_more_and_the_choice_never_less_than_the_present_order() {
    let request = request();
    for (rows, columns, pattern) in
        [(300, 172, (2, 4)), (33, 64, (1, 2)), (130, 64, (6, 8)), (5, 4, (2, 4))]
    {
        let weight = matrix(rows, columns);
        let chosen = choose(&weight, &request, &|_| (), pattern).unwrap();
        assert!(is_permutation(&chosen.order));
        assert!(chosen.kept_after >= chosen.kept_before);
        let search = ChannelSearch::new(&weight, &request, &|_| (), pattern);
        assert_eq!(search.kept(&chosen.order).unwrap(), chosen.kept_after);
        if columns > pattern.1 {
            assert!(chosen.kept_after > chosen.kept_before);
            let dealt = search.deal().unwrap();
            let assigned = search.assign(&dealt).unwrap();
            assert!(search.kept(&assigned).unwrap() > search.kept(&dealt).unwrap());
        }
    }
    // Nothing is better than any order here.
    let equal = StoredMatrix::from_f32(StoredDtype::F32, 3, 16, &[1.0; 48]);
    let chosen = choose(&equal, &request, &|_| (), (2, 4)).unwrap();
    assert_eq!(chosen.order, Vec::from_iter(0..16));
    assert_eq!((chosen.kept_before, chosen.kept_after), (24.0, 24.0));
}

#[test]
fn one_and_eight_threads_choose_the_same_bits() {
    let with = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        pool.build().unwrap().install(|| {
            let weight = matrix(700, 344);
            choose(&weight, &request(), &|_| (), (2, 4)).unwrap()
        })
    };
    assert_eq!(with(1), with(8));
}

#[test]
fn scores_that_overflow_a_sum_end_in_an_order_and_others_that_are_not_finite_in_an_error() {
    let large = StoredMatrix::from_f32(StoredDtype::F32, 130, 8, &[f32::MAX; 1040]);
    let chosen = choose(&large, &request(), &|_| (), (2, 4)).unwrap();
    assert!(is_permutation(&chosen.order));
    let mut values = [1.0; 16];
    values[13] = f32::NAN;
    let bad = StoredMatrix::from_f32(StoredDtype::F32, 2, 8, &values);
    let error = choose(&bad, &request(), &|_| (), (2, 4)).unwrap_err();
    let expected = "down_proj` has a weight that is NaN or infinite at row 1, column 5";
    assert!(error.to_string().contains(expected), "{error}");
}

/// Run by hand, with optimisation: the time of a matrix of Llama-2-7B's shape.
#[test]
#[ignore = "a measurement"]
fn time_of_a_wide_matrix() {
    let (rows, columns) = (4096, 11008);
    let mut state = 7u64;
    let values: Vec<f32> = (0..rows * columns)
        .map(|at| {
            let mut sum = 0.0;
            for _ in 0..4 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                sum += (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
            }
            sum * (1.0 + ((at % columns) as f32 * 0.7).sin().powi(8) * 3.0)
        })
        .collect();
    let weight = StoredMatrix::from_f32(StoredDtype::Bf16, rows, columns, &values);
    let request = request();
    let search = ChannelSearch::new(&weight, &request, &|_| (), (2, 4));
    let start = std::time::Instant::now();
    let dealt = search.deal().unwrap();
    let dealt_in = start.elapsed();
    let mut gains = vec![0.0; (columns / 4).pow(2)];
    search.gains(&dealt, 0, &mut gains).unwrap();
    let gains_in = start.elapsed() - dealt_in;
    let assigned = assign(&gains, columns / 4);
    let assigned_in = start.elapsed() - dealt_in - gains_in;
    panic!("{dealt_in:?} {gains_in:?} {assigned_in:?} {}", assigned[0]);
}
