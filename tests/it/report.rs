//! `prune report` on real runs of a tiny model: files, their contents, refusals, and the output errors in them.

use std::fs;

use prune::demo::embedded;

use crate::support::Place;

/// A place with the runs `wanda`, `magnitude` (both sides evaluated) in `runs/`.
fn two_runs() -> Place {
    let place = Place::new();
    for (method, ratio) in [("wanda", "0.5"), ("magnitude", "0.6")] {
        let save = format!("runs/{method}");
        place.prune(&format!(
            "--model m --prune-method {method} --sparsity-ratio {ratio} --eval both \
             --no-save-model --save {save}"
        ));
    }
    place
}

/// Panics unless `text` is one well-formed XML element, its tags closed in order and its attributes quoted, with every `&` the
/// beginning of an entity. Comments, CDATA and processing instructions do not occur.
#[track_caller]
fn assert_well_formed(text: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = text.trim();
    let mut elements = 0;
    while let Some(start) = rest.find('<') {
        assert_entities(&rest[..start]);
        assert!(
            !open.is_empty() || rest[..start].trim().is_empty() && elements == 0,
            "text outside the root: {}",
            &rest[..start]
        );
        rest = &rest[start + 1..];
        let end = end_of_tag(rest);
        let tag = &rest[..end];
        rest = &rest[end + 1..];
        elements += 1;
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name.trim()), "closed out of order");
            continue;
        }
        let is_closed = tag.ends_with('/');
        let tag = tag.trim_end_matches('/');
        let (name, mut attributes) =
            tag.split_at(tag.find(char::is_whitespace).unwrap_or(tag.len()));
        assert!(!name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == ':'));
        while let Some((attribute, after)) = attributes.trim_start().split_once("=\"") {
            assert!(!attribute.contains(char::is_whitespace), "{attribute}");
            let (value, after) = after.split_once('"').expect("a quoted value ends");
            assert!(!value.contains('<'), "{value}");
            assert_entities(value);
            attributes = after;
        }
        assert!(attributes.trim().is_empty(), "not an attribute: {attributes}");
        if !is_closed {
            open.push(name);
        }
    }
    assert!(rest.trim().is_empty(), "text after the root: {rest}");
    assert!(open.is_empty() && elements > 1, "left open: {open:?}");
}

/// The end of the tag: the first `>` outside quotes.
fn end_of_tag(text: &str) -> usize {
    let mut is_quoted = false;
    for (at, character) in text.char_indices() {
        match character {
            '"' => is_quoted = !is_quoted,
            '>' if !is_quoted => return at,
            _ => {}
        }
    }
    panic!("a tag never ends: {text}");
}

#[track_caller]
fn assert_entities(text: &str) {
    for (at, _) in text.match_indices('&') {
        let known = ["&amp;", "&lt;", "&gt;", "&quot;", "&apos;", "&#x27;", "&#x2f;"];
        assert!(
            known.iter().any(|entity| text[at..].starts_with(entity)),
            "not an entity: {}",
            &text[at..]
        );
    }
}

/// Panics if something would be fetched or run.
#[track_caller]
fn assert_self_contained(text: &str) {
    // The name of the language, and links inside the page, ask for nothing.
    let without_namespace = text.replace("http://www.w3.org/2000/svg", "").replace("href=\"#", "");
    for forbidden in
        ["http:", "https:", "<script", "<link", "<iframe", "@import", "url(", " src=", "href="]
    {
        assert!(!without_namespace.contains(forbidden), "`{forbidden}`");
    }
}

#[test]
fn one_run_is_drawn_into_its_own_folder() {
    let place = two_runs();
    let ran = place.run("report runs/wanda");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let written: Vec<&str> = ran.stdout.lines().collect();
    assert_eq!(
        written,
        [
            "runs/wanda/report/sparsity.svg",
            "runs/wanda/report/output-error.svg",
            "runs/wanda/report/phases.svg",
            "runs/wanda/report/memory.svg",
            "runs/wanda/report/report.html"
        ]
    );
    for file in written {
        let text = fs::read_to_string(place.path(file)).expect("it was written");
        assert_self_contained(&text);
        if file.ends_with(".svg") {
            assert_well_formed(&text);
        } else {
            assert!(text.starts_with("<!doctype html>"), "{text}");
            assert_well_formed_pictures(&text);
        }
    }
    // The folder stays a run folder, and what was drawn is replaced without a word.
    let again = place.run("report runs/wanda/run.json");
    assert_eq!((again.code, again.stdout), (0, ran.stdout));
}

#[track_caller]
fn assert_well_formed_pictures(html: &str) {
    let mut count = 0;
    for picture in html.split("<svg").skip(1) {
        let (picture, _) = picture.split_once("</svg>").expect("a picture ends");
        assert_well_formed(&format!("<svg{picture}</svg>"));
        count += 1;
    }
    assert!(count > 0, "no pictures in the page");
}

#[test]
fn several_runs_are_compared_on_one_page() {
    let place = two_runs();
    let ran = place.run("report runs/wanda runs/magnitude runs/wanda");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("`runs/wanda` was named before"));
    let names = place.names("report");
    for name in [
        "report.html",
        "perplexity.svg",
        "wanda-sparsity.svg",
        "wanda-output-error.svg",
        "magnitude-sparsity.svg",
        "magnitude-memory.svg",
    ] {
        assert!(names.contains(name), "no `{name}` in {names:?}");
    }
    // Magnitude saw no calibration, so there is nothing to measure errors on.
    assert!(!names.contains("magnitude-output-error.svg"));
    let page = fs::read_to_string(place.path("report/report.html")).expect("it was written");
    assert_self_contained(&page);
    assert_well_formed_pictures(&page);
    let dense = place.manifest("runs/wanda").perplexity.dense.expect("both sides");
    let expected = format!("dense: {:.4}", dense.perplexity);
    assert!(page.contains(&expected), "no `{expected}`");
    let other = place.run("report --out elsewhere runs/wanda runs/magnitude");
    assert_eq!(other.code, 0, "{}", other.stderr);
    assert!(place.path("elsewhere/report.html").is_file());
}

#[test]
fn names_of_folders_and_models_are_escaped() {
    let place = two_runs();
    let record = place.path("runs/wanda/run.json");
    let text = fs::read_to_string(&record).expect("a finished run");
    let evil = r#"\"><script>alert(1)</script><b title='"#;
    fs::write(&record, text.replace(r#""path": "m""#, &format!(r#""path": "{evil}""#)))
        .expect("replaced");
    assert!(place.manifest("runs/wanda").model.path.contains("<script>"));
    fs::rename(place.path("runs/wanda"), place.path("runs/<i>&amp;")).expect("renamed");
    let ran = place.run("report --out drawn runs/<i>&amp; runs/magnitude");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let page = fs::read_to_string(place.path("drawn/report.html")).expect("it was written");
    assert_self_contained(&page);
    assert_well_formed_pictures(&page);
    assert!(!page.contains("<i>") && page.contains("&lt;i&gt;&amp;amp;"));
    for name in place.names("drawn") {
        assert!(!name.contains(['<', '&', ';']), "{name}");
    }
}

#[test]
fn what_is_no_finished_run_of_ours_is_refused() {
    let place = Place::new();
    let refused = |arguments: &str, code: i32, message: &str| {
        let ran = place.run(arguments);
        assert_eq!(ran.code, code, "{arguments:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(message), "{arguments:?}: {}", ran.stderr);
        assert_eq!(ran.stdout, "");
    };
    fs::create_dir_all(place.path("empty")).expect("a new folder");
    fs::create_dir_all(place.path("begun/model")).expect("a new folder");
    for (folder, text) in [
        ("newer", r#"{"schema": 99, "prune_version": "7.1.0"}"#),
        ("broken", r#"{"schema": 1,"#),
        ("other", r#"{"name": "package"}"#),
    ] {
        fs::create_dir_all(place.path(folder)).expect("a new folder");
        fs::write(place.path(folder).join("run.json"), text).expect("a new file");
    }
    refused("report", 2, "<RUN>");
    refused("report nowhere", 2, "there is no run folder `nowhere`");
    refused("report empty", 2, "`empty` is not a run folder: it has no run.json");
    refused("report m", 2, "`m` is a model, not a run folder");
    refused("report m", 2, "hint: name the folder that --save named");
    refused("report train.txt", 2, "`train.txt` is not a run folder");
    refused("report begun", 1, "the run in `begun` is not finished");
    refused("report newer", 1, "its schema is 99, this program reads up to 1");
    refused("report newer", 1, "use prune 7.1.0 or newer");
    refused("report broken", 1, "`broken/run.json` is not the record of a run");
    refused("report other", 1, "missing field");
    fs::create_dir_all(place.path("nested/run.json")).expect("a new folder");
    refused("report nested", 1, "is a directory");
    let endless = fs::File::create(place.path("other/run.json")).expect("a new file");
    // 64 MiB is the most that is read; the file takes no room on the disk.
    endless.set_len((64 << 20) + 1).expect("a sparse file");
    refused("report other", 1, "it is larger than 64.00 MiB");
}

#[test]
fn folders_that_hold_runs_and_models_without_a_run_get_the_command_to_type() {
    let place = Place::new();
    let hint = |arguments: &str, hint: &str| {
        let ran = place.run(arguments);
        assert_eq!(ran.code, 2, "{arguments:?}: {}", ran.stderr);
        let last = ran.stderr.trim_end().lines().next_back();
        assert_eq!(last, Some(hint), "{arguments:?}: {}", ran.stderr);
    };
    let run = |name: &str| {
        fs::create_dir_all(place.path(name)).expect("a new folder");
        fs::write(place.path(name).join("run.json"), "{}").expect("a new file");
    };
    ["out/b", "out/a"].into_iter().for_each(run);
    hint("report out", "hint: name them: prune report out/a out/b");
    ["out/c", "out/d"].into_iter().for_each(run);
    hint("report out", "hint: name them: prune report out/a out/b out/c …");
    let quantized = place.run("quantize --model m --to nf4 --save out/nf4");
    assert_eq!(quantized.code, 0, "{}", quantized.stderr);
    hint("report out/nf4", "hint: measure it: prune eval out/nf4");
}

#[test]
fn a_folder_with_the_name_of_the_record_is_refused_before_anything_is_computed() {
    let place = Place::new();
    fs::create_dir_all(place.path("out/run.json")).expect("a new folder");
    let ran = place.run("eval --model m --eval-dataset test.txt --seqlen 64 --save out --force");
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("`out/run.json` is a folder; the record of the run needs this name"),
        "{}",
        ran.stderr
    );
}

#[test]
fn a_report_does_not_replace_a_file_by_a_folder() {
    let place = two_runs();
    let ran = place.run("report runs/wanda --out train.txt");
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("`train.txt` is a file"), "{}", ran.stderr);
}

#[test]
fn output_errors_are_measured_where_there_is_calibration_and_grow_with_the_ratio() {
    let place = Place::new();
    let errors = |method: &str, ratio: &str, more: &str| -> Vec<Option<f64>> {
        let save = format!("{method}{ratio}");
        let first = format!(
            "--model m --prune-method {method} --sparsity-ratio {ratio} --eval none \
             --no-save-model --force --save {save}"
        );
        // `prune` adds the texts; `--eval none` leaves the evaluation text alone.
        place.prune(&format!("{first} {more}"));
        let manifest = place.manifest(&save);
        let matrices = manifest.layers.iter().flat_map(|layer| &layer.matrices);
        matrices.map(|matrix| matrix.relative_output_error).collect()
    };
    let (few, many) = (errors("wanda", "0.3", ""), errors("wanda", "0.7", ""));
    assert_eq!(few.len(), 14);
    for (few, many) in few.iter().zip(&many) {
        let (few, many) = (few.expect("measured"), many.expect("measured"));
        assert!(0.0 < few && few < many && many < 1.0, "{few} {many}");
    }
    assert!(errors("magnitude", "0.5", "").iter().all(Option::is_none));
    let some = errors("wanda", "0.5", "--include *gate_proj");
    let measured: Vec<usize> = (0..14).filter(|&index| some[index].is_some()).collect();
    assert_eq!(measured, [4, 11], "gate is the fifth of seven");
    let one_thread = errors("wanda", "0.7", "--threads 1");
    assert_eq!(one_thread, many, "threads change nothing");
}

/// Runs that prune nothing are named after what they did, in their table and on the page.
#[test]
fn runs_without_pruning_have_the_names_of_what_they_did() {
    let place = two_runs();
    let text = "--eval-dataset test.txt --seqlen 64 --eval-windows 4";
    let lines = [
        "--model m --prune-method magnitude --sparsity-ratio 0.5 --eval none --save pruned".to_string(),
        "recover --model pruned/model --how lora --rank 2 --dataset train.txt --seqlen 64 --batch-size 1 --nsamples 4 --held-out 2 \
         --steps 1 --eval none --save runs/recovered"
            .to_string(),
        format!("merge --model m --model pruned/model --method linear --weight 0.5 --eval all {text} --save runs/merged"),
        "quantize --model m --to nf4 --save four-bit".to_string(),
        format!("eval --model four-bit {text} --save runs/four-bit"),
        format!("eval --model m {text} --save runs/dense"),
    ];
    let mut tables = Vec::new();
    for line in &lines {
        let ran = place.run(line);
        assert_eq!(ran.code, 0, "{line}\n{}", ran.stderr);
        tables.push(format!("{}{}", ran.stdout, ran.stderr));
    }
    for table in &tables[4..] {
        let lines = || table.lines().map(str::trim_start);
        assert!(lines().any(|line| line.starts_with("perplexity ")), "{table}");
        assert!(!table.contains("dense perplexity"), "{table}");
    }
    for (run, name) in [
        ("recovered", "recovered by lora"),
        ("merged", "merged by linear"),
        ("four-bit", "4 bits, nf4"),
    ] {
        let ran = place.run(&format!("report runs/wanda runs/{run} --out page"));
        assert_eq!(ran.code, 0, "{run}\n{}", ran.stderr);
        let page = fs::read_to_string(place.path("page/report.html")).expect("it was written");
        assert!(page.contains(name), "{run}: no `{name}`");
        assert!(!page.contains("<td>none<"), "{run}");
        let is_merge = run == "merged";
        assert_eq!(page.contains("<pre>merge_method: linear\n"), is_merge, "{run}");
        assert!(!page.contains("\\n"), "{run}");
    }
}

/// Two runs on the demo model, the first with a measured speed of its model and of the dense model.
fn timed_runs() -> Place {
    let place = Place::empty();
    embedded::write_model(&place.path("dense")).expect("a new folder");
    for (method, ratio) in [("wanda", "0.6"), ("magnitude", "0.5")] {
        let ran = place.run(&format!(
            "--model dense --prune-method {method} --sparsity-ratio {ratio} --dataset demo --nsamples 2 --eval-dataset demo \
             --eval-windows 2 --eval both --save runs/{method}"
        ));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
    }
    let ran = place.run(
        "generate runs/wanda/model --compare dense --prompt One --max-tokens 8 --bench --json",
    );
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    fs::write(place.path("runs/wanda/speed.json"), ran.stdout).expect("a new file");
    place
}

#[test]
fn perplexity_is_drawn_over_bytes_and_over_measured_speeds() {
    let place = timed_runs();
    let ran = place.run("report runs/wanda runs/magnitude");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let page = fs::read_to_string(place.path("report/report.html")).expect("it was written");
    assert_self_contained(&page);
    assert_well_formed_pictures(&page);
    for column in ["bytes", "without zeros", "tokens&#x2f;s"] {
        assert!(page.contains(&format!("<th scope=\"col\">{column}</th>")), "no `{column}`");
    }
    // The tensors of the demo model, and a bit per weight in place of 50 % of 921,600 weights.
    assert!(page.contains("<td>2.01 MiB</td><td>1.24 MiB</td><td>–</td>"), "{page}");
    let picture =
        |name: &str| fs::read_to_string(place.path("report").join(name)).expect("it was written");
    let bytes = picture("perplexity-bytes.svg");
    for name in ["wanda", "magnitude", "dense"] {
        assert!(bytes.contains(&format!(">{name}</text>")), "no `{name}`");
    }
    // `magnitude` has no speed.
    let speed = picture("perplexity-speed.svg");
    assert!(speed.contains(">wanda</text>") && speed.contains(">dense</text>"), "{speed}");
    assert!(!speed.contains("magnitude"), "{speed}");

    let file = place.path("runs/wanda/speed.json");
    let whole = fs::read_to_string(&file).expect("written above");
    let no_speed = whole.replace("\"tokens_per_second\"", "\"speed\"");
    for (broken, why) in
        [("", "EOF"), ("{}", "missing field"), (&no_speed, "not a positive number")]
    {
        fs::write(&file, broken).expect("replaced");
        let ran = place.run("report runs/wanda runs/magnitude");
        assert_eq!(ran.code, 1, "{}", ran.stderr);
        for part in [
            "`runs/wanda/speed.json` has no speed of decoding",
            why,
            "hint: make it again: prune generate runs/wanda/model --prompt \"Once upon a time\" --bench --json > \
             runs/wanda/speed.json, or remove it",
        ] {
            assert!(ran.stderr.contains(part), "no `{part}` in {}", ran.stderr);
        }
    }
    fs::remove_file(&file).expect("removed");
    let again = place.run("report runs/wanda runs/magnitude --out again");
    assert_eq!(again.code, 0, "{}", again.stderr);
    assert!(
        !again.stdout.contains("perplexity-speed.svg")
            && again.stdout.contains("perplexity-bytes.svg")
    );
}
