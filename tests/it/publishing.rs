//! Files for strangers beside a pruned model: `pruning.json`, the model card, the card of the source, and the command that uploads
//! them.

use std::collections::BTreeSet;
use std::fs;

use prune::checkpoint::is_model_file;
use prune::report::front_matter::FrontMatter;
use prune::run::{Inspection, PruningRecord};
use prune::synthetic::RandomCheckpoint;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::support::{Place, TEXTS, assert_snapshot, ran};

const HALF: &str = "--model m --sparsity-ratio 0.5";

const META_CARD: &str =
    "---\nlicense: llama2\nlicense_name: 'x'\nlanguage:\n- en\ntags: [theirs]\n---\n# The source\n";

fn read(place: &Place, name: &str) -> String {
    fs::read_to_string(place.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn record(place: &Place, run: &str) -> PruningRecord {
    let text = read(place, &format!("{run}/model/pruning.json"));
    PruningRecord::parse(text.as_bytes()).expect("a record")
}

fn front_matter(place: &Place, run: &str) -> FrontMatter {
    FrontMatter::of(read(place, &format!("{run}/model/README.md")).as_bytes())
}

/// The cards in a model's folder.
fn cards(place: &Place, run: &str) -> Vec<String> {
    let names = place.names(&format!("{run}/model")).into_iter();
    names.filter(|name| name.starts_with("README")).collect()
}

#[test]
fn the_card_is_what_the_snapshot_shows() {
    let place = Place::new();
    fs::write(place.path("m/README.md"), META_CARD).expect("a new file");
    let flags = "--model m --sparsity-type 2:4 --eval both --exclude *.v_proj --use-cpu";
    place.prune(&format!("{flags} --dtype f32 --save out"));
    // Perplexities and kernel depend on the machine.
    let settled: String = read(&place, "out/model/README.md")
        .lines()
        .map(|line| match line.split_once(" | ") {
            Some((name @ "| Arithmetic", _)) => format!("{name} | … |\n"),
            Some((name @ ("| Source" | "| This model"), value)) if value.contains('.') => {
                format!("{name} | … |\n")
            }
            _ => format!("{line}\n"),
        })
        .collect();
    assert_snapshot("card.md", &settled);
    assert_eq!(read(&place, "out/model/README.source.md"), META_CARD);
    let record = record(&place, "out");
    let card = read(&place, "out/model/README.md");
    for report in [record.perplexity.dense, record.perplexity.pruned] {
        let shown = format!("| {:.4} |", report.expect("both are measured").perplexity);
        assert!(card.contains(&shown), "{card}");
    }
}

/// The command of a card.
fn command_of(card: &str) -> &str {
    let (_, rest) = card.split_once("```sh\n").expect("a command");
    rest.split_once("\n```").expect("its end").0
}

#[test]
fn cards_of_all_commands_have_the_same_parts_and_commands_that_repeat_the_run() {
    let place = Place::new();
    fs::write(place.path("m/README.md"), META_CARD).expect("a new file");
    place.prune(&format!("{HALF} --eval none --save run --save-model p"));
    fs::write(
        place.path("p/README.md"),
        META_CARD.replace("tags:", "base_model: owner/tiny\ntags:"),
    )
    .expect("a new file");
    let recover = "recover --model p --dataset train.txt --eval-dataset test.txt --seqlen 64 --eval-windows 2 --steps 2";
    for (line, relation) in [
        (format!("{recover} --how full --lr 3e-3 --save out"), Some("finetune")),
        (format!("{recover} --how blocks --teacher m --nsamples 4 --save out"), Some("finetune")),
        ("quantize --to nf4 p --save out/model".to_string(), Some("quantized")),
        (
            format!(
                "merge --base {} --model p --method ties --density 0.5 --keep-zeros \
                 --eval-dataset {} --eval-windows 2 --seqlen 64 --save out",
                place.path("m").display(),
                place.path("test.txt").display()
            ),
            None,
        ),
    ] {
        let ran = place.run(&format!("{line} --force"));
        assert_eq!(ran.code, 0, "{line}\n{}", ran.stderr);
        let card = read(&place, "out/model/README.md");
        let head = front_matter(&place, "out");
        assert_eq!(head.get("library_name"), ["transformers"], "{card}");
        assert_eq!(head.get("pipeline_tag"), ["text-generation"]);
        assert_eq!(
            (head.get("license"), head.get("language")),
            (&["llama2".to_string()][..], &["en".to_string()][..])
        );
        let base = relation.map(|_| "owner/tiny".to_string());
        assert_eq!(head.get("base_model"), base.as_slice(), "{line}");
        assert_eq!(head.get("base_model_relation").first().map(String::as_str), relation);
        assert!(!head.get("tags").is_empty() && card.contains("from_pretrained("), "{card}");
        // The list of hashes has the card that is there, also where it was written again.
        let sum = prune::bytes::hex(&Sha256::digest(card.as_bytes()));
        assert!(read(&place, "out/model/SHA256SUMS").contains(&format!("{sum}  README.md")));
        let weights = fs::read(place.path("out/model/model.safetensors")).expect("weights");
        if line.starts_with("merge") {
            let measured = place.manifest("out").merge.expect("a merge").perplexities;
            assert_eq!(measured.len(), 3);
            for row in measured {
                let name = row.model.rsplit('/').next().expect("a name");
                let shown = format!("| `{name}` | {:.4} |", row.report.perplexity);
                assert!(card.contains(&shown), "{shown}\n{card}");
            }
            let folder = place.path("").display().to_string();
            assert!(!card.contains(folder.trim_end_matches('/')), "{card}");
            fs::copy(place.path("out/model/merge_config.yml"), place.path("merge_config.yml"))
                .expect("a copy");
        }
        let quantizes = line.starts_with("quantize");
        let command = command_of(&card).strip_prefix("prune ").expect("this program");
        let ran = place.run(&format!("{command} --force"));
        assert_eq!(ran.code, 0, "{command}\n{}", ran.stderr);
        let again = if quantizes { "out/model.safetensors" } else { "out/model/model.safetensors" };
        assert!(fs::read(place.path(again)).expect("weights") == weights, "{command}");
        fs::remove_dir_all(place.path("out")).expect("it was written");
    }
}

#[test]
fn the_record_agrees_with_run_json_and_has_no_times() {
    let place = Place::new();
    place.prune(&format!("{HALF} --eval both --save out"));
    let (record, manifest) = (record(&place, "out"), place.manifest("out"));
    assert_eq!(record.schema, 1);
    assert_eq!(Some(record.pruning), manifest.pruning);
    assert_eq!(Some(record.sparsity), manifest.sparsity);
    assert_eq!(record.perplexity, manifest.perplexity);
    assert_eq!(record.source.identity, manifest.model.identity);
    let matrices: Vec<_> = manifest.layers.into_iter().flat_map(|layer| layer.matrices).collect();
    assert_eq!(record.matrices, matrices);
    let (calibration, there) = (record.calibration.unwrap(), manifest.calibration.unwrap());
    assert_eq!(calibration.tokens_sha256, there.tokens_sha256);
    assert_eq!(calibration.text_sha256, there.text_sha256);
    let json: Value = serde_json::from_str(&read(&place, "out/model/pruning.json")).unwrap();
    let names: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            "arithmetic",
            "calibration",
            "command",
            "dtype",
            "evaluation",
            "matrices",
            "perplexity",
            "prune_version",
            "pruning",
            "schema",
            "source",
            "sparsity",
        ]
    );
}

/// Every word that tells a stranger about the person or the machine.
#[test]
fn nothing_that_is_published_names_the_machine_or_the_person() {
    let place = Place::empty();
    let home = "Home-Of-Zebedee";
    fs::create_dir_all(place.path(&format!("{home}/texts"))).expect("a new folder");
    place.checkpoint(&format!("{home}/m"), &RandomCheckpoint::default());
    for name in ["train.txt", "test.txt"] {
        fs::copy(place.path(name), place.path(&format!("{home}/texts/{name}"))).expect("a copy");
    }
    let at = |name: &str| place.path(&format!("{home}/{name}")).display().to_string();
    fs::write(at("ratios.json"), "[0.5, 0.6]").expect("a new file");
    let line = format!(
        "--model {} --layer-ratios {} --dataset {} --eval-dataset wikitext2:{} --save {} --save-model {} \
         --offload-folder {} --text-cache {} --cache-dir {} --hidden-states disk --eval both --nsamples 4 \
         --seqlen 64 --eval-windows 2 --save-masks --log-memory",
        at("m"),
        at("ratios.json"),
        at("texts/train.txt"),
        at("texts/test.txt"),
        at("run"),
        at("run/model"),
        at("spill"),
        at("cache"),
        at("hub")
    );
    fs::create_dir(at("spill")).expect("a new folder");
    let mut command = place.command(&line);
    command
        .env("HF_TOKEN", "hf_ZebedeesToken")
        .env("USER", "zebedee-the-user")
        .env("LOGNAME", "zebedee-the-user")
        .env("HOSTNAME", "zebedees-host")
        .env("SLURM_JOB_ID", "zebedees-job");
    let ran = ran(&mut command);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let root = place.path("");
    let folders = root.components().filter_map(|part| part.as_os_str().to_str());
    // Names of a few letters may be parts of other words.
    let words: Vec<&str> =
        folders.chain([host.trim(), home]).filter(|word| word.len() >= 8).collect();
    assert!(words.contains(&home));
    let manifest = read(&place, &format!("{home}/run/run.json"));
    assert!(words.iter().any(|word| manifest.contains(word)), "run.json has them");
    for name in ["pruning.json", "README.md", "SHA256SUMS"] {
        let text = read(&place, &format!("{home}/run/model/{name}"));
        for word in &words {
            assert!(!text.contains(word), "{name} has {word}:\n{text}");
        }
        assert!(!text.to_lowercase().contains("zebedee"), "{name}:\n{text}");
        for word in ["texts/", "spill", "hf_", "started", "seconds"] {
            assert!(!text.contains(word), "{name} has {word}:\n{text}");
        }
    }
}

/// Flags that do not decide weights and perplexities, and those that name what every command names.
const OTHER_FLAGS: [&str; 47] = [
    "cache-dir",
    "dataset",
    "device",
    "device-map",
    "eval-dataset",
    "eval-windows",
    "force",
    "help",
    "hidden-states",
    "json",
    "log-memory",
    "max-memory",
    "max-perplexity",
    "memory-settings",
    "model",
    "no-model-card",
    "no-save-model",
    "nsamples",
    "offload-folder",
    "profile",
    "progress",
    "quiet",
    "resume",
    "revision",
    "save",
    "save-masks",
    "save-model",
    "seqlen",
    "simulate",
    "text-cache",
    "threads",
    "use-cpu",
    "verbose",
    "verify",
    "version",
    // They become numbers of layers or shares of the width.
    "target-params",
    "target-size",
    // They measure the result, and gate it.
    "kl-positions",
    "max-kl",
    "tasks",
    "tasks-from",
    "eval-zero-shot",
    "num-fewshot",
    "limit",
    "add-bos",
    "min-accuracy",
    "log-samples",
];

#[test]
fn the_command_of_the_record_repeats_the_run() {
    let mut repeated = BTreeSet::from(OTHER_FLAGS.map(String::from));
    for flags in [
        "--sparsity-ratio 0.4 --exclude *.v_proj --exclude *.o_proj --include *_proj --seed 7",
        "--prune-method magnitude --sparsity-type 2:4 --dtype f32",
        "--prune-method ria-per-row --layer-ratios ratios.json --eval none --sparsity-ratio 0.5",
        "--sparsity-ratio 0.5 --use-variant",
        "--prune-method sparsegpt --sparsity-ratio 0.5 --percdamp 0.1 --blocksize 32 --true-sequential",
        "--sparsity-ratio 0.5 --refine weights --propagate dense --allocate owl --owl-outliers 4 --ratio-band 0.1",
        "--sparsity-ratio 0.5 --refine dsnot --dsnot-cycles 3 --dsnot-mlp",
        "--sparsity-type 2:4 --permute-channels --eval none",
        "--drop-layers 1 --drop-rule angle --eval none",
        "--layers-dropped 1 --drop-width 0.3 --width-of mlp --no-width-refit --eval none",
    ] {
        let place = Place::new();
        fs::write(place.path("ratios.json"), r#"{"1": 0.25}"#).expect("a new file");
        place.prune(&format!("--model m {flags} --save first"));
        let first = record(&place, "first");
        let given = flags.split(' ').filter_map(|word| word.strip_prefix("--"));
        for name in given {
            repeated.insert(name.to_string());
            let is_named = first.command.contains(&format!("--{name}"));
            // This flag is part of a method's name.
            assert!(is_named || name == "use-variant", "{name}: {:?}", first.command);
        }
        if let Some(ratios) = &first.pruning.layer_ratios {
            let json = serde_json::to_string(ratios).unwrap();
            fs::write(place.path("layer_ratios.json"), json).expect("a new file");
        }
        let mut command = place.command("");
        let ran = ran(command.args(&first.command[1..]));
        assert_eq!(ran.code, 0, "{:?}\n{}", first.command, ran.stderr);
        // The record of the repetition is the same, its command included.
        assert_eq!(record(&place, "out"), first);
    }
    let command = prune::cli::command();
    let flags = command.get_arguments().filter_map(|flag| flag.get_long());
    let forgotten: Vec<&str> = flags.filter(|flag| !repeated.contains(*flag)).collect();
    assert!(forgotten.is_empty(), "no run above has {forgotten:?}");
}

#[test]
fn a_source_without_a_card_has_no_licence_here_and_no_base_model() {
    let place = Place::new();
    place.prune(&format!("{HALF} --save out"));
    let card = read(&place, "out/model/README.md");
    assert!(card.contains("The licence of the source is not known"), "{card}");
    let front_matter = front_matter(&place, "out");
    for key in ["license", "language", "base_model", "datasets"] {
        assert!(front_matter.get(key).is_empty(), "{key}: {card}");
    }
    assert_eq!(front_matter.get("tags"), ["prune", "pruned", "sparse", "wanda", "unstructured"]);
    assert_eq!(front_matter.get("pipeline_tag"), ["text-generation"]);
    assert_eq!(cards(&place, "out"), ["README.md"]);
}

#[test]
fn a_declined_card_leaves_the_source_its_own() {
    let place = Place::new();
    fs::write(place.path("m/README.md"), META_CARD).expect("a new file");
    place.prune(&format!("{HALF} --save out --no-model-card"));
    assert_eq!(cards(&place, "out"), ["README.md"]);
    assert_eq!(read(&place, "out/model/README.md"), META_CARD);
    record(&place, "out");
    // The card of this program would be wrong about the next model.
    place.prune(&format!("{HALF} --save carded"));
    place.prune("--model carded/model --sparsity-ratio 0.6 --save again --no-model-card");
    assert_eq!(cards(&place, "again"), ["README.source.md", "README.source.source.md"]);
    assert_eq!(read(&place, "again/model/README.source.source.md"), META_CARD);
}

#[test]
fn a_model_that_is_pruned_twice_has_a_record_and_a_card_of_the_second_time() {
    let place = Place::new();
    fs::write(place.path("m/README.md"), META_CARD).expect("a new file");
    place.prune(&format!("{HALF} --save first"));
    place.prune("--model first/model --prune-method magnitude --sparsity-ratio 0.75 --save second");
    let second = record(&place, "second");
    assert_eq!(second.pruning.method, "magnitude");
    assert_eq!(second.source.name, "first");
    assert_eq!(second.sparsity.zeros_before, record(&place, "first").sparsity.zeros);
    assert_eq!(
        cards(&place, "second"),
        ["README.md", "README.source.md", "README.source.source.md"]
    );
    let same = |of: &str, kept: &str| {
        assert_eq!(read(&place, of), read(&place, &format!("second/model/{kept}")));
    };
    same("first/model/README.md", "README.source.md");
    same("m/README.md", "README.source.source.md");
    let card = read(&place, "second/model/README.md");
    assert!(card.contains("| Pruned before | `wanda`, 50 % `unstructured` |"), "{card}");
    assert_eq!(front_matter(&place, "second").get("license"), ["llama2"]);
    // The model on the hub is still the base where the first record names it, unless that is no name.
    for (id, base) in [("some-owner/Tiny", Some("some-owner/Tiny")), ("](x) a/b", None)] {
        let path = place.path("first/model/pruning.json");
        crate::support::edit_json(&path, |json| json["source"]["id"] = id.into());
        place.prune("--model first/model --sparsity-ratio 0.75 --eval none --save third --force");
        assert_eq!(record(&place, "third").base_model(), base);
        assert_eq!(
            front_matter(&place, "third").get("base_model").first().map(String::as_str),
            base
        );
    }
}

#[test]
fn hostile_cards_and_names_are_quoted_or_passed_over() {
    let place = Place::new();
    let name = "m `x` | y: \"z\" # [a](b) <!-- \u{202e}é --- -->";
    fs::rename(place.path("m"), place.path(name)).expect("the folder moves");
    let prune = |save: &str| {
        let mut command =
            place.command(&format!("--sparsity-ratio 0.5 --eval none --save {save} {TEXTS}"));
        let ran = ran(command.args(["--model", name]));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        read(&place, &format!("{save}/model/README.md"))
    };
    let readme = place.path(name).join("README.md");
    let long = format!("---\nlicense: mit\nx: {}\n---\n", "y".repeat(200_000));
    let hostile: [&[u8]; 7] = [
        b"---\nlicense: \"mit\\n---\\n# owned\\u0085\"\nlanguage: [en, {a: b}]\n---\n",
        b"---\nlicense: &a [*a, *a]\nlanguage: !!python/object x\n---\n",
        b"---\nlicense: |\n  mit\nlanguage: \xff\xfe\n---\n",
        b"---\nlicense: mit",
        b"\0\0\0",
        b"",
        long.as_bytes(),
    ];
    for (number, content) in hostile.iter().enumerate() {
        fs::write(&readme, content).expect("a new file");
        let save = format!("out{number}");
        let card = prune(&save);
        let front_matter = FrontMatter::of(card.as_bytes());
        assert_eq!(front_matter.get("library_name"), ["transformers"], "{card}");
        // The front matter ends once, and the table has two columns.
        assert_eq!(card.lines().filter(|line| *line == "---").count(), 2, "{card}");
        for row in card.lines().filter(|line| line.starts_with('|')) {
            assert_eq!(row.replace("\\|", "").matches('|').count(), 3, "{row}");
            assert_eq!(row.matches('`').count() % 2, 0, "{row}");
        }
        assert!(!card.contains('\u{202e}') && !card.contains("\n# owned"), "{card}");
        let kept = fs::read(place.path(&format!("{save}/model/README.source.md")));
        assert_eq!(kept.expect("the source's card"), *content);
    }
    assert_eq!(front_matter(&place, "out0").get("license"), ["mit\n---\n# owned\u{85}"]);
    // A folder or a link to nowhere of this name is no card.
    fs::remove_file(&readme).expect("it was written");
    fs::create_dir(&readme).expect("a new folder");
    prune("folder");
    fs::remove_dir(&readme).expect("it was made");
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("nowhere", &readme).expect("a new link");
        prune("link");
        assert_eq!(cards(&place, "link"), ["README.md"]);
    }
}

#[test]
fn the_last_line_is_the_command_that_uploads_the_model() {
    let place = Place::new();
    let last = |flags: &str| {
        let ran = place.prune(&format!("{HALF} --eval none --force {flags}"));
        let last = ran.stderr.lines().last().unwrap_or_default().to_string();
        assert!(!ran.stdout.contains("hf upload"), "{}", ran.stdout);
        (last, ran.stderr)
    };
    let (line, _) = last("--save out");
    assert_eq!(line, "publish it with: hf upload YOUR_NAME/m-wanda-0.5 out/model");
    let (line, _) = last("--save 'my out'");
    assert_eq!(line, "publish it with: hf upload YOUR_NAME/m-wanda-0.5 'my out/model'");
    // One folder for both: run.json has paths of this machine.
    let (line, _) = last("--save one --save-model one");
    assert_eq!(line, "publish it with: hf upload YOUR_NAME/m-wanda-0.5 one --exclude run.json");
    for flags in ["--save out --json", "--save out --quiet", "--save out2 --no-save-model", ""] {
        let (_, stderr) = last(flags);
        assert!(!stderr.contains("hf upload"), "{flags}: {stderr}");
    }
}

#[test]
fn force_replaces_the_cards_of_the_run_before() {
    let place = Place::new();
    fs::write(place.path("m/README.md"), META_CARD).expect("a new file");
    place.prune(&format!("{HALF} --eval none --save out"));
    fs::remove_file(place.path("m/README.md")).expect("it was written");
    place.prune(&format!("{HALF} --eval none --save out --force --no-model-card"));
    assert_eq!(cards(&place, "out"), Vec::<String>::new());
    assert!(place.names("out/model").iter().all(|name| is_model_file(name)));
}

#[test]
fn inspect_shows_the_record_and_passes_over_others() {
    let place = Place::new();
    place.prune(&format!("{HALF} --eval both --save out --dtype f32 --use-cpu"));
    let path = place.path("out/model/pruning.json");
    let inspect = |more: &str| {
        let ran = place.run(&format!("inspect out/model {more}"));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        ran
    };
    let shown = inspect("").stdout;
    let rows: Vec<&str> =
        shown.lines().skip_while(|line| !line.starts_with("pruned by")).take(5).collect();
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(rows[0], format!("pruned by   prune {version}: wanda 0.5000 unstructured"));
    assert_eq!(rows[1], "made from   m");
    assert_eq!(rows[2], "calibration text (train.txt), 4 of 64 tokens, seed 0");
    assert!(rows[3].starts_with("perplexity  dense "), "{}", rows[3]);
    assert_eq!(rows[4], "measured on text (test.txt), 5 windows of 64 tokens");
    let json: Value = serde_json::from_str(&inspect("--json").stdout).expect("one JSON object");
    let file: Value = serde_json::from_slice(&fs::read(&path).expect("written")).expect("JSON");
    assert_eq!(json["pruning"], file);

    let good = fs::read(&path).expect("written");
    let zeros = record(&place, "out").sparsity.zeros;
    let other = String::from_utf8(good.clone())
        .expect("text")
        .replace(&format!("\"zeros\": {zeros},"), "\"zeros\": 1,");
    let cut = good[..good.len() / 2].to_vec();
    for (content, expected) in [
        (b"".to_vec(), "pruning.json is passed over: EOF".to_string()),
        (cut, "pruning.json is passed over: EOF".to_string()),
        (b"[1, 2]".to_vec(), "pruning.json is passed over: ".to_string()),
        (b"{\"schema\": 9}".to_vec(), "pruning.json is passed over: it has schema 9".to_string()),
        (b"\xff\x1b[2J".to_vec(), "pruning.json is passed over: ".to_string()),
        ("[".repeat(100_000).into_bytes(), "pruning.json is passed over: ".to_string()),
        (other.into_bytes(), "pruning.json is of another model: it counts 1 zeros".to_string()),
    ] {
        fs::write(&path, content).expect("it can be replaced");
        let ran = inspect("--json");
        assert!(ran.stderr.starts_with(&format!("warning: {expected}")), "{}", ran.stderr);
        assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
        assert!(!ran.stderr.contains('\u{1b}'), "{}", ran.stderr);
        let found: Inspection = serde_json::from_str(&ran.stdout).expect("one JSON object");
        assert_eq!(found.pruning, None);
    }
    // Names in a record cannot act on the terminal.
    fs::write(&path, &good).expect("it can be replaced");
    crate::support::edit_json(&path, |json| {
        json["pruning"]["method"] = "\u{1b}[2J".into();
        json["source"]["name"] = "x".repeat(10_000).into();
    });
    let shown = inspect("").stdout;
    assert!(!shown.contains('\u{1b}') && shown.contains("\\u{1b}[2J"), "{shown}");
    assert!(shown.len() < 3000, "{}", shown.len());
    fs::remove_file(&path).expect("it was written");
    let without = inspect("");
    assert_eq!(without.stderr, "");
    assert!(!without.stdout.contains("pruned by"), "{}", without.stdout);
    fs::create_dir(&path).expect("a new folder");
    assert!(inspect("").stderr.contains("pruning.json is passed over"));
}
