//! The text of `prune inspect`: a summary, the sparsity of every layer, and the comparison with a dense model. Lines are at most
//! 80 columns wide, except for names the user gave.

use super::format::{finite, millions, short_name, with_seed};
use super::packing;
use crate::bytes::ByteSize;
use crate::failure::printable;
use crate::run::inspection::{
    DenseComparison, InspectedLayer, Inspection, PackedStorage, PatternCount, Zeros,
};
use crate::run::{PruningRecord, TextProtocol};

/// Names in a list before it is cut short.
const NAMES_SHOWN: usize = 3;

/// Numbers of layers in a list before it is cut short.
const LAYERS_SHOWN: usize = 16;

/// The whole report, ending in a newline.
pub fn text(inspection: &Inspection) -> String {
    let indented =
        |lines: Vec<String>| -> String { lines.iter().map(|line| format!("  {line}\n")).collect() };
    let mut text = format!("{}\n{}", summary(inspection), layers(inspection));
    if !inspection.problems.is_empty() {
        text += &format!("\nproblems\n{}", indented(problems(inspection)));
    }
    if let Some(comparison) = &inspection.against {
        let lines = indented(comparison_lines(inspection, comparison));
        text += &format!("\nagainst {}\n{lines}", comparison.dense);
    }
    text
}

/// Decoder linears that contradict config.json, a line each.
pub fn problems(inspection: &Inspection) -> Vec<String> {
    let lines = inspection
        .problems
        .iter()
        .map(|problem| format!("{}: {}", problem.tensor, problem.problem));
    printed(shortened(lines.collect(), 2 * NAMES_SHOWN))
}

/// Differences that show that a model is no pruned copy of the dense model; empty for a pruned copy.
pub fn differences(comparison: &DenseComparison) -> Vec<String> {
    let dense = &comparison.dense;
    let mut lines = Vec::new();
    if !comparison.kept_identical {
        lines.push(format!(
            "{} of {} kept weights differ from {dense}; the first:",
            comparison.changed, comparison.kept
        ));
        if let Some(first) = &comparison.first_changed {
            let value = |value: Option<f32>| value.map_or("not finite".into(), |v| v.to_string());
            lines.push(format!("  {}, row {}, column {}", first.tensor, first.row, first.column));
            lines.push(format!("  {} there, {} here", value(first.dense), value(first.found)));
        }
    }
    let unlike = &comparison.unlike;
    let names: Vec<String> = unlike.iter().map(|tensor| tensor.tensor.clone()).collect();
    let of = format!(" of {}", comparison.untouched);
    for (what, names, of) in [
        ("other tensors that differ", &comparison.untouched_differing, &*of),
        ("tensors missing here", &comparison.missing, ""),
        (&format!("tensors not in {dense}"), &comparison.added, ""),
        ("tensors of another dtype or shape, not compared", &names, ""),
    ] {
        if !names.is_empty() {
            lines.push(format!("{what}: {}{of}", names.len()));
            let shown = shortened(names.clone(), NAMES_SHOWN).into_iter();
            lines.extend(shown.map(|name| format!("  {name}")));
        }
    }
    if let Some(first) = unlike.first() {
        let (dense, found) = (&first.dense, &first.found);
        lines.push(format!(
            "  the first is {} {:?} there, {} {:?} here",
            dense.dtype, dense.shape, found.dtype, found.shape
        ));
    }
    printed(lines)
}

/// Lines without control characters: names of tensors come from files.
fn printed(lines: Vec<String>) -> Vec<String> {
    let lines = lines.into_iter();
    lines.map(|line| printable(&line).into_owned()).collect()
}

fn summary(inspection: &Inspection) -> String {
    let dtypes: Vec<String> = match &inspection.dtypes[..] {
        [one] => vec![one.dtype.clone()],
        several => {
            several.iter().map(|share| format!("{} ({})", share.dtype, share.bytes)).collect()
        }
    };
    let files: ByteSize = inspection.shards.iter().map(|shard| shard.bytes).sum();
    let count = match inspection.shards.len() {
        1 => "1 file".to_string(),
        several => format!("{several} files"),
    };
    let non_finite = match inspection.non_finite {
        0 => "none".to_string(),
        count => format!("{count} values"),
    };
    let (layers, size) = (inspection.num_hidden_layers, inspection.hidden_size);
    let parameters = millions(inspection.parameters);
    let Zeros { zeros, weights, ratio } = inspection.sparsity;
    let mut rows = vec![
        ("model", inspection.model.clone()),
        ("shape", format!("{layers} layers of {size}, {parameters} parameters")),
        ("stored as", format!("{}, {files} in {count}", dtypes.join(", "))),
        // Empty for a checkpoint that is not packed, and then left out.
        ("packed", inspection.packed.as_ref().map_or(String::new(), packed)),
        ("sparsity", format!("{ratio:.6} ({zeros} of {weights} weights of the decoder linears)")),
        ("pattern", patterns(&inspection.patterns)),
    ];
    let gain = inspection.zeros_gain.iter();
    let gain = gain.flat_map(|gain| packing::gain(gain, inspection.packed.is_some())).enumerate();
    rows.extend(gain.map(|(number, line)| (if number == 0 { "gain" } else { "" }, line)));
    rows.push(("not finite", non_finite));
    for (index, kind) in inspection.other.iter().enumerate() {
        let name = if index == 0 { "others" } else { "" };
        let zeros = format!("{}: {} of {} values are zero", kind.kind, kind.zeros, kind.parameters);
        rows.push((name, zeros));
    }
    rows.extend(inspection.pruning.iter().flat_map(pruning_rows));
    rows.retain(|(name, value)| *name != "packed" || !value.is_empty());
    rows.into_iter().map(|(name, value)| format!("{name:<12}{value}\n")).collect()
}

/// The storage of packed matrices.
fn packed(storage: &PackedStorage) -> String {
    let PackedStorage { format, values, matrices, dense_bytes } = storage;
    let lossy = if values == "int8" { ", lossy" } else { "" };
    format!("{matrices} matrices, {format}, {values} values{lossy}; {dense_bytes} dense")
}

/// The facts of `pruning.json`.
fn pruning_rows(record: &PruningRecord) -> Vec<(&'static str, String)> {
    /// Characters of a name that are shown: names come from the file.
    const LONGEST: usize = 60;
    let shown = |text: &str| -> String { printable(text).chars().take(LONGEST).collect() };
    let (pruning, source) = (&record.pruning, &record.source);
    let (version, method) = (shown(&record.prune_version), shown(&pruning.method));
    let (ratio, pattern) = (pruning.sparsity_ratio, shown(&pruning.sparsity_type));
    let name = shown(source.id.as_ref().unwrap_or(&source.name));
    let commit = source.commit.as_deref().map(shown);
    let commit = commit.map_or(String::new(), |commit| format!(", commit {commit:.12}"));
    let changes = [
        record.layer_drop.as_ref().map(|drop| format!("without {}", drop.in_words())),
        record.width_drop.as_ref().map(|drop| format!("narrower, {}", drop.in_words())),
        record.removes_weights().then(|| format!("{method} {ratio:.4} {pattern}")),
    ];
    let changes: Vec<String> = changes.into_iter().flatten().collect();
    let mut rows = vec![
        ("pruned by", printable(&format!("prune {version}: {}", changes.join(", "))).into_owned()),
        ("made from", format!("{name}{commit}")),
    ];
    let text = |text: &TextProtocol, what: &str| {
        let TextProtocol { dataset, path, windows, seqlen, .. } = text;
        let seed = with_seed(text);
        format!("{} ({}), {windows} {what}of {seqlen} tokens{seed}", shown(dataset), shown(path))
    };
    rows.extend(record.calibration.iter().map(|of| ("calibration", text(of, ""))));
    let measured = &record.perplexity;
    let reports = [("dense", measured.dense), ("pruned", measured.pruned)].into_iter();
    let perplexities: Vec<String> = reports
        .filter_map(|(side, report)| Some(format!("{side} {}", finite(report?.perplexity))))
        .collect();
    if !perplexities.is_empty() {
        rows.push(("perplexity", perplexities.join(", ")));
    }
    rows.extend(record.evaluation.iter().map(|of| ("measured on", text(of, "windows "))));
    rows
}

fn patterns(counts: &[PatternCount]) -> String {
    const NO_PATTERN: &str = "no pattern";
    let name = |count: &PatternCount| count.pattern.clone().unwrap_or(NO_PATTERN.into());
    match counts {
        [] => "no decoder linears".to_string(),
        [all] if all.pattern.is_none() => {
            format!("{NO_PATTERN} in any of {} matrices", all.matrices)
        }
        [all] => format!("{} in all {} matrices", name(all), all.matrices),
        several => {
            let (shown, rest) = several.split_at(NAMES_SHOWN.min(several.len()));
            let shown = shown.iter().map(|count| format!("{} in {}", name(count), count.matrices));
            let rest = rest.iter().map(|count| count.matrices).reduce(|sum, more| sum + more);
            let rest = rest.map(|rest| format!("others in {rest}"));
            format!("{} matrices", shown.chain(rest).collect::<Vec<_>>().join(", "))
        }
    }
}

fn layers(inspection: &Inspection) -> String {
    let columns = columns(inspection);
    let headings = columns.iter().map(|heading| cell(heading, heading.to_string()));
    let mut text =
        format!("{:<10}{}{:>7}  pattern\n", "zeros %", headings.collect::<String>(), "all");
    let cells = |layers: &[InspectedLayer]| -> String {
        let of_column = |column: &&str| {
            let matrices = layers.iter().flat_map(|layer| &layer.matrices);
            let matrices = matrices.filter(|matrix| short_name(&matrix.name) == *column);
            let zeros: Vec<Zeros> = matrices.map(|matrix| matrix.sparsity).collect();
            cell(
                column,
                if zeros.is_empty() { "-".to_string() } else { percent(Zeros::sum(&zeros)) },
            )
        };
        columns.iter().map(of_column).collect()
    };
    for layer in &inspection.layers {
        let name = format!("layer {}", layer.layer);
        let cells = cells(std::slice::from_ref(layer));
        text += &row(&name, &cells, layer.sparsity, &pattern_of(layer));
    }
    text + &row("all", &cells(&inspection.layers), inspection.sparsity, "")
}

/// Columns of the table: the linears of the layer that has most of them.
fn columns(inspection: &Inspection) -> Vec<&str> {
    let layers = inspection.layers.iter();
    let fullest = layers.max_by_key(|layer| layer.matrices.len());
    let matrices = fullest.into_iter().flat_map(|layer| &layer.matrices);
    matrices.map(|matrix| short_name(&matrix.name)).collect()
}

/// A cell of a column, which is as wide as a percentage or its heading.
fn cell(heading: &str, text: String) -> String {
    format!("{text:>0$}", (heading.len() + 1).max(7))
}

fn row(name: &str, cells: &str, all: Zeros, pattern: &str) -> String {
    let line = format!("{name:<10}{cells}{:>7}  {pattern}", percent(all));
    format!("{}\n", line.trim_end())
}

/// A percentage with two digits. Only no zeros print as 0.00, and only all zeros as 100.00.
fn percent(zeros: Zeros) -> String {
    let percent = format!("{:.2}", 100.0 * zeros.ratio);
    match percent.as_str() {
        "0.00" if zeros.zeros > 0 => "<0.01".to_string(),
        "100.00" if zeros.zeros < zeros.weights => ">99.99".to_string(),
        _ => percent,
    }
}

/// The pattern that all matrices of a layer share.
fn pattern_of(layer: &InspectedLayer) -> String {
    let mut patterns = layer.matrices.iter().map(|matrix| &matrix.pattern);
    match patterns.next() {
        None => String::new(),
        Some(first) if patterns.all(|pattern| pattern == first) => {
            first.clone().unwrap_or_else(|| "none".to_string())
        }
        Some(_) => "mixed".to_string(),
    }
}

/// Sizes before and after, where they differ, and the dropped layers.
fn sizes(inspection: &Inspection, comparison: &DenseComparison) -> Vec<String> {
    let mut lines = Vec::new();
    let (before, after) = (comparison.dense_parameters, inspection.parameters);
    if before != after && before > 0 {
        let (before, after) = (millions(before), millions(after));
        let (there, here) = (comparison.dense_bytes, inspection.bytes);
        lines.push(format!("{before} parameters in {there} there, {after} in {here} here"));
    }
    let dropped = comparison.layers_dropped.iter();
    let dropped: Vec<String> = dropped.map(ToString::to_string).collect();
    if !dropped.is_empty() {
        let shown = shortened(dropped, LAYERS_SHOWN);
        lines.push(format!("layers dropped: {}", shown.join(", ")));
    }
    if let Some(width) = &comparison.width_dropped {
        lines.push(format!("width dropped: {}", printable(width)));
    }
    lines
}

fn comparison_lines(inspection: &Inspection, comparison: &DenseComparison) -> Vec<String> {
    let dense = &comparison.dense;
    let every = match comparison.unlike.is_empty() && comparison.missing.is_empty() {
        true => "every",
        false => "where compared, every",
    };
    let mut lines = sizes(inspection, comparison);
    let (kept, untouched) = (comparison.kept, comparison.untouched);
    if comparison.kept_identical && kept > 0 {
        lines.push(format!("{every} kept weight equals {dense}, bit for bit ({kept} weights)"));
    }
    if comparison.untouched_differing.is_empty() && untouched > 0 {
        lines.push(format!(
            "{every} other tensor equals {dense}, byte for byte ({untouched} tensors)"
        ));
    }
    if comparison.zeros_before > 0 {
        lines.push(format!("weights that were zero there already: {}", comparison.zeros_before));
    }
    lines.extend(differences(comparison));
    lines.push(format!("verdict: {}", verdict(inspection, comparison)));
    lines
}

fn verdict(inspection: &Inspection, comparison: &DenseComparison) -> String {
    let dense = &comparison.dense;
    let has_new_zeros = inspection.sparsity.zeros > comparison.zeros_before;
    let pruned = if has_new_zeros { ", pruned" } else { "" };
    if comparison.is_pruned_copy {
        return match (comparison.layers_dropped.is_empty(), has_new_zeros) {
            (false, _) => format!("{} layers of {dense}{pruned}", inspection.num_hidden_layers),
            (true, true) => format!("a pruned copy of {dense}"),
            (true, false) => format!("the weights of {dense}; nothing was pruned"),
        };
    }
    if !comparison.is_made_from_dense() {
        return format!("not a pruned copy of {dense}");
    }
    if let Some(merge) = &comparison.merged_by {
        return format!("a merge by {}", printable(merge));
    }
    let method = comparison.changed_by.as_deref();
    if comparison.width_dropped.is_some() {
        let pruned = method.map(|method| format!(", then pruned by {method}"));
        let zeros = if has_new_zeros { ", then pruned" } else { "" };
        return format!("{dense} made narrower{}", pruned.as_deref().unwrap_or(zeros));
    }
    let how = match comparison.permuted {
        true => {
            ", with the channels of its MLPs permuted; weights at another place count as changed"
        }
        false => ", which changes the weights it keeps",
    };
    format!("{dense} pruned by {}{how}", method.unwrap_or_default())
}

fn shortened(mut lines: Vec<String>, shown: usize) -> Vec<String> {
    if lines.len() > shown {
        let more = lines.len() - shown;
        lines.truncate(shown);
        lines.push(format!("and {more} more"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_zeros_never_print_as_none_and_many_never_as_all() {
        let shown = |zeros, weights| percent(Zeros::of(zeros, weights));
        assert_eq!(shown(0, 1_000_000), "0.00");
        assert_eq!(shown(1, 1_000_000), "<0.01");
        assert_eq!(shown(999_999, 1_000_000), ">99.99");
        assert_eq!(shown(5, 5), "100.00");
        assert_eq!(shown(0, 0), "0.00");
    }

    #[test]
    fn a_row_fits_eighty_columns_in_the_deepest_model() {
        let all = Zeros::of(5, 5);
        let line = row("layer 125", &cell("down", percent(all)).repeat(7), all, "31:32");
        assert!(line.trim_end().len() <= 80, "{}", line.len());
    }

    #[test]
    fn patterns_of_all_matrices_are_one_phrase() {
        let of = |pattern: Option<&str>| {
            patterns(&[PatternCount { pattern: pattern.map(String::from), matrices: 35 }])
        };
        assert_eq!(of(Some("2:4")), "2:4 in all 35 matrices");
        assert_eq!(of(None), "no pattern in any of 35 matrices");
    }

    #[test]
    fn long_lists_are_cut_short() {
        let names: Vec<String> = (0..5).map(|name| name.to_string()).collect();
        assert_eq!(shortened(names.clone(), 3), ["0", "1", "2", "and 2 more"]);
        assert_eq!(shortened(names.clone(), 5), names);
    }

    #[test]
    fn every_difference_is_one_printable_line() {
        let comparison = serde_json::json!({
            "dense": "dense", "is_pruned_copy": false, "kept_identical": true, "kept": 0, "changed": 0,
            "first_changed": null, "zeros_before": 0, "untouched": 0, "untouched_differing": [],
            "missing": ["\u{1b}[2J\n"], "added": [],
            "unlike": [{
                "tensor": "a",
                "dense": {"dtype": "BF16", "shape": [2, 3]},
                "found": {"dtype": "F32", "shape": [2, 3]},
            }],
        });
        let comparison: DenseComparison = serde_json::from_value(comparison).unwrap();
        assert_eq!(
            differences(&comparison),
            [
                "tensors missing here: 1",
                "  \\u{1b}[2J\\n",
                "tensors of another dtype or shape, not compared: 1",
                "  a",
                "  the first is BF16 [2, 3] there, F32 [2, 3] here",
            ]
        );
    }
}
