//! The hot parts on real layer shapes: products, attention, one decoder layer, scoring and selection, factorisations, writing.
//!
//! `cargo bench` runs all; `cargo bench -- products` one group. Where a group multiplies, criterion prints how much of the peak each
//! product reaches in place of elements per second: the peak is measured before the group, by the same instruction on registers
//! alone and as many threads. `RAYON_NUM_THREADS=1` gives the figures of one thread. Compare ratios, not seconds.
#![allow(missing_docs, reason = "criterion's macros generate undocumented items")]
#![expect(clippy::print_stderr, reason = "the peak belongs beside criterion's own lines")]

mod repairs;

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use candle_core::Tensor;
use criterion::measurement::{Measurement, ValueFormatter, WallTime};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use prune::bytes::ByteSize;
use prune::checkpoint::{Checkpoint, CheckpointWriter, WeightSource};
use prune::linalg::attention::{self, Heads, Scoring};
use prune::linalg::linear::SingleToken;
use prune::linalg::matmul::{Threads, View, matmul};
use prune::linalg::peak;
use prune::linalg::product::{Kernel, Values};
use prune::linalg::{Linear, ProductContext, Products, StoredDtype, StoredMatrix, tensor};
use prune::model::{DecoderLayer, InputId, LayerContext, ModelConfig, Observer};
use prune::pruning::{self, ColumnSquares, METHODS, Pattern, Request, Statistics, Target};
use prune::run::Silent;
use prune::run::verification::VerifyLevel;
use prune::synthetic::RandomCheckpoint;

/// Values without pattern in [-0.5, 0.5), the same in every run.
fn noise(count: usize) -> Vec<f32> {
    let mut state = 1u32;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        })
        .collect()
}

/// Wall time; elements, which are FLOP, per second as a share of [`PEAK`].
struct OfPeak;

/// GFLOP/s; 0 where elements are printed as they are.
static PEAK: AtomicU64 = AtomicU64::new(0);

/// Measures the peak of a kernel, against which what follows is printed; an f32 product by parts takes several of its products.
fn against(kernel: Kernel) {
    let threads = rayon::current_num_threads();
    let peak = peak::of(kernel, threads) / kernel.terms() as f64;
    eprintln!("peak of {kernel:?} on {threads} threads: {peak:.0} GFLOP/s");
    PEAK.store(peak as u64, Ordering::Relaxed);
}

/// Ends the comparison with a peak.
fn against_nothing() {
    PEAK.store(0, Ordering::Relaxed);
}

impl Measurement for OfPeak {
    type Intermediate = <WallTime as Measurement>::Intermediate;
    type Value = Duration;

    fn start(&self) -> Self::Intermediate {
        WallTime.start()
    }

    fn end(&self, start: Self::Intermediate) -> Duration {
        WallTime.end(start)
    }

    fn add(&self, one: &Duration, other: &Duration) -> Duration {
        WallTime.add(one, other)
    }

    fn zero(&self) -> Duration {
        WallTime.zero()
    }

    fn to_f64(&self, value: &Duration) -> f64 {
        WallTime.to_f64(value)
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        self
    }
}

impl ValueFormatter for OfPeak {
    fn scale_values(&self, typical: f64, values: &mut [f64]) -> &'static str {
        WallTime.formatter().scale_values(typical, values)
    }

    fn scale_throughputs(
        &self,
        typical: f64,
        throughput: &Throughput,
        values: &mut [f64],
    ) -> &'static str {
        let (Throughput::Elements(operations), peak @ 1..) =
            (throughput, PEAK.load(Ordering::Relaxed))
        else {
            return WallTime.formatter().scale_throughputs(typical, throughput, values);
        };
        // Nanoseconds per iteration, so FLOP over them are GFLOP/s.
        for value in values {
            *value = *operations as f64 / *value / peak as f64 * 100.0;
        }
        "% of peak"
    }

    fn scale_for_machines(&self, values: &mut [f64]) -> &'static str {
        WallTime.formatter().scale_for_machines(values)
    }
}

/// f32, f32 by parts and bf16 where the CPU has them.
fn arithmetics() -> Vec<Products> {
    let split = Kernel::has_split().then_some(Products::Split);
    let bf16 = Kernel::best_bf16().map(Products::AllBf16);
    [Some(Products::F32), split, bf16].into_iter().flatten().collect()
}

/// tokens x in · (out x in)ᵀ: our linear for each stored dtype and arithmetic, and the gemm crate alone on f32.
fn products(criterion: &mut Criterion<OfPeak>) {
    for products in arithmetics() {
        products_of(criterion, products);
    }
    against_nothing();
}

fn products_of(criterion: &mut Criterion<OfPeak>, products: Products) {
    let mut group = criterion.benchmark_group(format!("products {products:?}"));
    group.sample_size(10).measurement_time(Duration::from_secs(5));
    for (tokens, inner, out) in
        [(2048, 4096, 11008), (2048, 2048, 5632), (128, 4096, 11008), (1, 4096, 11008)]
    {
        let shape = format!("{tokens}x{inner}x{out}");
        group.throughput(Throughput::Elements(2 * (tokens * inner * out) as u64)); // FLOP
        let (x, weight) = (noise(tokens * inner), noise(out * inner));
        let mut y = vec![0.0; tokens * out];
        if products == Products::F32 {
            against(Kernel::Fused);
            group.bench_function(BenchmarkId::new("gemm crate alone, f32", &shape), |bencher| {
                let lhs = View::strided(&x, tokens, inner, inner);
                let rhs = View::strided(&weight, out, inner, inner).transposed();
                bencher.iter(|| matmul(&mut y, out, 1.0, lhs, rhs, Threads::All));
            });
        }
        for dtype in [StoredDtype::F32, StoredDtype::Bf16, StoredDtype::F16] {
            against(products.kernel(dtype));
            let weight = StoredMatrix::from_f32(dtype, out, inner, &weight);
            let linear = Linear::new(weight, None).reused();
            let mut context = ProductContext::new();
            context.products = products;
            context.keeps_packed = true;
            group.bench_function(
                BenchmarkId::new(format!("linear, {} weight", dtype.name()), &shape),
                |bencher| {
                    bencher.iter(|| {
                        linear
                            .forward(&x, &mut y, SingleToken::AsMany, &mut context)
                            .expect("in memory")
                    });
                },
            );
            if tokens == 1 {
                // Read it as bytes: half the FLOP/s times the bytes of a weight.
                group.bench_function(
                    BenchmarkId::new(format!("straight, {} weight", dtype.name()), &shape),
                    |bencher| {
                        bencher.iter(|| {
                            linear
                                .forward(&x, &mut y, SingleToken::MatrixVector, &mut context)
                                .expect("in memory")
                        });
                    },
                );
            }
        }
    }
}

fn blocked_attention(criterion: &mut Criterion<OfPeak>) {
    for products in arithmetics() {
        let kernel = products.of_activations();
        against(kernel);
        attention_of(criterion, kernel);
    }
    against_nothing();
}

fn attention_of(criterion: &mut Criterion<OfPeak>, kernel: Kernel) {
    let mut group = criterion.benchmark_group(format!("attention {kernel:?}"));
    group.sample_size(10).measurement_time(Duration::from_secs(5));
    for (name, num_heads, num_key_value_heads, head_dim) in
        [("llama-2-7b", 32, 32, 128), ("llama-3-8b", 32, 8, 128), ("tinyllama", 32, 4, 64)]
    {
        let (seqlen, heads) = (2048, Heads { num_heads, num_key_value_heads, head_dim });
        let scoring = Scoring::of_width(head_dim);
        // Half of two products of [seqlen, seqlen] by head_dim per head.
        group.throughput(Throughput::Elements((2 * seqlen * seqlen * num_heads * head_dim) as u64));
        let q = noise(seqlen * num_heads * head_dim);
        let (k, v) = (
            noise(seqlen * num_key_value_heads * head_dim),
            noise(seqlen * num_key_value_heads * head_dim),
        );
        let mut out = vec![0.0; q.len()];
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let (k, v) = (Values::F32(&k), Values::F32(&v));
                attention::Causal { kernel, heads, scoring, past: 0, q: &q, k, v }.context(&mut out)
            })
        });
    }
}

struct Watch;

impl Observer for Watch {
    fn observe(&mut self, _: InputId, rows: &[f32]) {
        black_box(rows.len());
    }
}

fn seven_b() -> RandomCheckpoint {
    RandomCheckpoint {
        hidden_size: 4096,
        intermediate_size: 11008,
        num_hidden_layers: 1,
        num_attention_heads: 32,
        num_key_value_heads: 32,
        dtype: StoredDtype::Bf16,
        max_shard: ByteSize(256 << 20),
        ..RandomCheckpoint::default()
    }
}

/// One layer of Llama-2-7B's shape with bf16 weights, 2048 tokens.
fn decoder_layer(criterion: &mut Criterion<OfPeak>) {
    for products in arithmetics() {
        let kernel = products.kernel(StoredDtype::Bf16);
        against(kernel);
        layer_of(criterion, kernel, products);
    }
    against_nothing();
}

fn layer_of(criterion: &mut Criterion<OfPeak>, kernel: Kernel, products: Products) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("7b");
    seven_b().write(&path, &Silent).expect("there is room for one layer");
    let config = ModelConfig::load(&path).expect("it was just written");
    let source = Checkpoint::open(&path).expect("it was just written");
    let layer = DecoderLayer::load(&source, &config, 0).expect("it was just written");
    let seqlen = 2048;
    let hidden: Tensor =
        tensor::from_vec(noise(seqlen * config.hidden_size), &[seqlen, config.hidden_size])
            .expect("the shape fits");
    let context = LayerContext::new(&config, seqlen);
    let mut context = context.with_products(products);
    let products = 2 * seqlen * (4 * 4096 * 4096 + 3 * 4096 * 11008);
    let attention = 2 * seqlen * seqlen * 4096;
    let mut group = criterion.benchmark_group(format!("decoder layer {kernel:?}"));
    group.sample_size(10).measurement_time(Duration::from_secs(20));
    group.throughput(Throughput::Elements((products + attention) as u64));
    group.bench_function("7b, bf16 weights, 2048 tokens, forward", |bencher| {
        bencher.iter(|| layer.forward(&hidden, &mut context).expect("shapes fit"));
    });
    group.throughput(Throughput::Elements(
        (products - 2 * seqlen * 4096 * 11008 + attention) as u64,
    ));
    group.bench_function("7b, bf16 weights, 2048 tokens, capture", |bencher| {
        bencher.iter(|| layer.capture(&hidden, &mut context, &mut Watch).expect("shapes fit"));
    });
}

/// Score and select, by method and pattern, in weights per second.
fn scoring(criterion: &mut Criterion<OfPeak>) {
    let mut group = criterion.benchmark_group("score and select");
    group.sample_size(10);
    for (rows, columns) in [(4096, 4096), (4096, 11008), (4096, 14336)] {
        let values = noise(rows * columns);
        let statistics = noise(columns).iter().map(|value| value.abs()).collect();
        let statistics = Statistics::Merged(Box::new(ColumnSquares::from_mean(statistics)));
        group.throughput(Throughput::Elements((rows * columns) as u64));
        let of_columns = |method: &&&dyn pruning::PruningMethod| {
            method.statistics().is_none_or(|kind| !kind.is_in_place())
        };
        for method in METHODS.iter().filter(of_columns) {
            for pattern in [Pattern::Unstructured, Pattern::NOfM { n: 2, m: 4 }] {
                if method.is_unstructured_only() && pattern != Pattern::Unstructured {
                    continue;
                }
                let mut weight = StoredMatrix::from_f32(StoredDtype::Bf16, rows, columns, &values);
                let target = Target { ratio: 0.5, pattern };
                let request = Request::new("w", Some(&statistics), target);
                group.bench_function(
                    BenchmarkId::new(
                        format!("{} {pattern}", method.name()),
                        format!("{rows}x{columns} bf16"),
                    ),
                    |bencher| {
                        bencher.iter(|| {
                            pruning::prune(*method, &mut weight, &request).expect("noise is finite")
                        });
                    },
                );
            }
        }
    }
}

/// From stored bytes to verified files: allocate, write, copy, sync, read back.
fn writing(criterion: &mut Criterion<OfPeak>) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("7b");
    seven_b().write(&path, &Silent).expect("there is room for one layer");
    let source = Arc::new(Checkpoint::open(&path).expect("it was just written"));
    let names: Vec<String> = source
        .tensors()
        .map(|tensor| tensor.name.clone())
        .filter(|name| name.contains("_proj"))
        .collect();
    let tensors: Vec<(String, Vec<u8>)> = names
        .into_iter()
        .map(|name| {
            let entry = source.entry(&name).expect("it was just listed");
            let mut bytes = vec![0; usize::try_from(entry.bytes).expect("it fits into memory")];
            source.read(entry, 0, &mut bytes).expect("it was just written");
            (name, bytes)
        })
        .collect();
    let mut group = criterion.benchmark_group("shard writing");
    group.sample_size(10).measurement_time(Duration::from_secs(20));
    group.throughput(Throughput::Bytes(source.total_bytes().0));
    group.bench_function("one 7b layer, bf16, written and verified", |bencher| {
        bencher.iter(|| {
            let target = tempfile::tempdir_in(folder.path()).expect("a temporary folder");
            let mut writer =
                CheckpointWriter::create(&source, target.path(), &Silent).expect("there is room");
            for (name, bytes) in &tensors {
                writer.write(name, bytes).expect("there is room");
            }
            writer.finish(&[], VerifyLevel::Quick, &Silent).expect("it verifies")
        });
    });
}

criterion_group!(
    name = benches;
    config = Criterion::default().with_measurement(OfPeak);
    targets = products, blocked_attention, decoder_layer, scoring, repairs::repairs, writing
);
criterion_main!(benches);
