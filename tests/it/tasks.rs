//! `--tasks`: prompts, token ids, log-likelihoods and accuracies, compared with what lm_eval 0.4.13 computes (`goldens/tasks`).

mod damaged_parquet;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use prune::data::Tokenizer;
use prune::run::tasks::{Accuracy, TaskReport};
use prune::run::{Manifest, Plan};
use prune::synthetic::RandomCheckpoint;
use prune::tasks::{
    Question, QuestionLimit, ScoredRequest, TaskFiles, TaskQuestions, TaskRequest, TaskSpec,
    TaskTokens, find,
};
use serde_json::Value;

use crate::support::{Place, shared};

const MODELS: [&str; 2] = ["stories260k", "wikitext-llama-8m"];

/// A file of goldens: a task of a model with some settings.
struct Golden {
    path: PathBuf,
    value: Value,
}

impl Golden {
    fn all(shared: &Path, model: &str) -> Vec<Self> {
        let folder = shared.join("goldens/tasks").join(model);
        let mut paths: Vec<PathBuf> = fs::read_dir(folder)
            .expect("as lm_eval wrote it")
            .map(|entry| entry.expect("as lm_eval wrote it").path())
            .collect();
        paths.sort();
        let read = |path: PathBuf| {
            let value = serde_json::from_slice(&fs::read(&path).expect("as lm_eval wrote it"))
                .expect("as lm_eval wrote it");
            Self { path, value }
        };
        paths.into_iter().map(read).collect()
    }

    fn task(&self) -> TaskSpec {
        self.value["task"]
            .as_str()
            .expect("as lm_eval wrote it")
            .parse()
            .expect("as lm_eval wrote it")
    }

    fn limit(&self) -> Option<QuestionLimit> {
        self.value["limit"]
            .as_f64()
            .map(|limit| limit.to_string().parse().expect("as lm_eval wrote it"))
    }

    fn num_fewshot(&self) -> usize {
        self.value["num_fewshot"].as_u64().expect("as lm_eval wrote it") as usize
    }

    fn add_bos(&self) -> Option<bool> {
        self.path.ends_with("arc_easy.without-bos.json").then_some(false)
    }

    /// The documents of a task, or of a subject.
    fn documents(&self, of: &TaskQuestions) -> &Vec<Value> {
        let name = match &of.subject {
            Some((subject, _)) => format!("{}_{subject}", of.task),
            None => of.task.clone(),
        };
        self.value["tasks"][name]["documents"].as_array().expect("a task")
    }

    fn questions(&self, shared: &Path) -> Vec<TaskQuestions> {
        let tasks = [self.task()];
        let from = shared.join("data/tasks");
        let request = TaskRequest {
            tasks: &tasks,
            files: TaskFiles::Folder(&from),
            num_fewshot: self.num_fewshot(),
            limit: self.limit(),
        };
        find(&request).expect("tasks that can be read")
    }
}

fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .expect("as lm_eval wrote it")
        .iter()
        .map(|id| id.as_u64().expect("as lm_eval wrote it") as u32)
        .collect()
}

fn texts(value: &Value) -> Vec<&str> {
    value
        .as_array()
        .expect("as lm_eval wrote it")
        .iter()
        .map(|text| text.as_str().expect("as lm_eval wrote it"))
        .collect()
}

/// Entry `choice` of a list with an entry per choice, or the entry that all share.
fn of_choice(list: &Value, choice: usize) -> &Value {
    let list = list.as_array().expect("as lm_eval wrote it");
    &list[choice.min(list.len() - 1)]
}

#[test]
fn prompts_and_token_ids_are_lm_evals() {
    let Some(shared) = shared() else { return };
    let mut compared = 0;
    for model in MODELS {
        let tokenizer = Tokenizer::load(&shared.join("models").join(model)).expect("a tokenizer");
        for golden in Golden::all(&shared, model) {
            let max_length =
                golden.value["max_length"].as_u64().expect("as lm_eval wrote it") as usize;
            let add_bos = golden.add_bos();
            let tokens = TaskTokens { tokenizer: &tokenizer, add_bos, max_length };
            let tasks = golden.questions(&shared);
            for task in &tasks {
                let mut questions: Vec<Question> = Vec::new();
                let mut take = |block| {
                    questions.extend::<Vec<Question>>(block);
                    Ok(())
                };
                task.for_each_block(&mut take).expect("questions");
                assert_eq!(questions.len(), task.count);
                let documents = golden.documents(task);
                assert_eq!(questions.len(), documents.len(), "{:?}", golden.path);
                for (question, document) in questions.iter().zip(documents) {
                    let requests = tokens.requests(question).expect("requests");
                    let place = format!("{:?} {}", golden.path, document["doc_id"]);
                    assert_eq!(
                        question.target as u64,
                        document["target"].as_u64().expect("as lm_eval wrote it")
                    );
                    assert_eq!(question.contexts, texts(&document["contexts"]), "{place}");
                    for (choice, request) in requests.iter().enumerate() {
                        let (_, answer) = question.choice(choice);
                        let continuation = of_choice(&document["continuations"], choice);
                        let ScoredRequest { context, continuation: scored } = request;
                        assert_eq!(*continuation, format!(" {answer}"), "{place}");
                        assert_eq!(
                            [context, scored],
                            [
                                &ids(of_choice(&document["context_tokens"], choice)),
                                &ids(of_choice(&document["continuation_tokens"], choice))
                            ],
                            "{place} {choice}"
                        );
                        compared += 1;
                    }
                }
            }
        }
    }
    assert!(compared > 4000, "{compared} requests");
}

/// Printed digits of lm_eval: four.
fn printed(value: f64) -> String {
    format!("{value:.4}")
}

fn same(accuracy: Accuracy, results: &Value, metric: &str, place: &str) {
    assert_eq!(
        printed(accuracy.value),
        printed(results[metric].as_f64().expect("as lm_eval wrote it")),
        "{place}"
    );
    let error = results[format!("{metric}_stderr")].as_f64();
    assert_eq!(accuracy.error.map(printed), error.map(printed), "{place} {metric}");
}

/// Compares the accuracies of a task.
fn compare_metrics(report: &TaskReport, golden: &Golden) {
    let place = format!("{:?}", golden.path);
    if report.subjects.is_empty() {
        let results = &golden.value["tasks"][&report.task]["results"];
        assert_eq!(
            report.questions as u64,
            results["documents"].as_u64().expect("as lm_eval wrote it")
        );
        same(report.acc, results, "acc", &place);
        assert_eq!(report.acc_norm.is_some(), !results["acc_norm"].is_null(), "{place}");
        if let Some(norm) = report.acc_norm {
            same(norm, results, "acc_norm", &place);
        }
        return;
    }
    same(report.acc, &golden.value["groups"][&report.task], "acc", &place);
    for (group, accuracy) in &report.groups {
        same(*accuracy, &golden.value["groups"][format!("{}_{group}", report.task)], "acc", group);
    }
    for subject in &report.subjects {
        let name = format!("{}_{}", report.task, subject.subject);
        same(subject.acc, &golden.value["tasks"][name]["results"], "acc", &subject.subject);
    }
}

/// The lines of `--log-samples` by task, subject and question.
fn samples(path: &Path) -> BTreeMap<(String, u64), Value> {
    let text = fs::read_to_string(path).expect("samples");
    let lines =
        text.lines().map(|line| serde_json::from_str::<Value>(line).expect("as lm_eval wrote it"));
    let key = |line: &Value| {
        let task = line["task"].as_str().expect("as lm_eval wrote it");
        let task = match line["subject"].as_str() {
            Some(subject) => format!("{task}_{subject}"),
            None => task.to_string(),
        };
        (task, line["question"].as_u64().expect("as lm_eval wrote it"))
    };
    lines.map(|line| (key(&line), line)).collect()
}

fn compare_document(line: &Value, document: &Value, max_length: usize, place: &str) {
    for (choice, scored) in
        line["choices"].as_array().expect("as lm_eval wrote it").iter().enumerate()
    {
        let continuation = ids(of_choice(&document["continuation_tokens"], choice));
        let mut all = ids(of_choice(&document["context_tokens"], choice));
        all.extend(&continuation);
        all.pop();
        let input = &all[all.len().saturating_sub(max_length)..];
        assert_eq!(ids(&scored["input"]), input, "{place}");
        assert_eq!(ids(&scored["continuation"]), continuation, "{place}");
        let [got, expected] = [&scored["log_likelihood"], &document["loglikelihood"][choice]]
            .map(|of| of.as_f64().expect("as lm_eval wrote it"));
        // The README of the goldens: f32 and f64 differ by up to 5.4e-5 and 3.1e-6.
        let allowed = 1e-4 + 1e-5 * expected.abs();
        assert!((got - expected).abs() <= allowed, "{place} {choice}: {got} is not {expected}");
        assert_eq!(scored["is_greedy"], document["is_greedy"][choice], "{place} {choice}");
    }
    assert_eq!(line["acc_index"], document["acc_index"], "{place}");
    if !document["acc_norm"].is_null() {
        assert_eq!(line["acc_norm_index"], document["acc_norm_index"], "{place}");
    }
}

/// Runs every golden of a model with the same settings, and compares requests and metrics. Returns the number of documents.
fn compare_model(shared: &Path, model: &str) -> usize {
    let mut groups: BTreeMap<String, Vec<Golden>> = BTreeMap::new();
    for golden in Golden::all(shared, model) {
        let mut line = format!("--num-fewshot {}", golden.num_fewshot());
        if let Some(limit) = golden.value["limit"].as_f64() {
            line += &format!(" --limit {limit}");
        }
        if let Some(bos) = golden.add_bos() {
            line += &format!(" --add-bos {bos}");
        }
        groups.entry(line).or_default().push(golden);
    }
    let mut documents = 0;
    for (line, goldens) in groups {
        let place = Place::empty();
        let tasks: Vec<String> = goldens.iter().map(|of| of.task().to_string()).collect();
        let (model, from) = (shared.join("models").join(model), shared.join("data/tasks"));
        let ran = place.run(&format!(
            "eval {} --tasks {} --tasks-from {} {line} --log-samples samples.jsonl --use-cpu --dtype f32 --json",
            model.display(),
            tasks.join(","),
            from.display()
        ));
        assert_eq!(ran.code, 0, "{line}\n{}", ran.stderr);
        let record: Manifest = serde_json::from_str(&ran.stdout).expect("a record");
        assert!(record.perplexity.dense.is_none(), "tasks only");
        let results = record.tasks.expect("tasks");
        let samples = samples(&place.path("samples.jsonl"));
        for golden in &goldens {
            let name = golden.task().to_string();
            let report = results.dense.iter().find(|report| report.task == name).expect("a task");
            compare_metrics(report, golden);
            let max_length =
                golden.value["max_length"].as_u64().expect("as lm_eval wrote it") as usize;
            for (task, of_task) in golden.value["tasks"].as_object().expect("as lm_eval wrote it") {
                for document in of_task["documents"].as_array().expect("as lm_eval wrote it") {
                    let number = document["doc_id"].as_u64().expect("as lm_eval wrote it");
                    let line = &samples[&(task.clone(), number)];
                    let place = format!("{:?} {task} {number}", golden.path);
                    compare_document(line, document, max_length, &place);
                    documents += 1;
                }
            }
        }
    }
    documents
}

#[test]
fn every_request_of_stories260k_is_scored_as_lm_eval_scores_it() {
    let Some(shared) = shared() else { return };
    let documents = compare_model(&shared, MODELS[0]);
    assert!(documents > 600, "{documents}");
}

#[test]
fn every_request_of_wikitext_llama_8m_is_scored_as_lm_eval_scores_it() {
    let Some(shared) = shared() else { return };
    let documents = compare_model(&shared, MODELS[1]);
    assert!(documents > 600, "{documents}");
}

/// A place with the model `m` and a task of three questions.
fn place_with_task(lines: &str) -> Place {
    let place = Place::new();
    fs::write(place.path("q.jsonl"), lines).expect("a new file");
    place
}

const QUESTIONS: &str = r#"{"context": "The first king of the old land was", "choices": ["a man", "a stone of the sea", "no"], "label": 0}
{"context": "The second king of the old land, who was the son of the first king, was", "choices": ["old", "young and tall"], "label": 1}
{"context": "A", "choices": ["b", "c"], "label": 0}
"#;

fn results(place: &Place, line: &str) -> Manifest {
    let ran = place.run(&format!("{line} --use-cpu --json"));
    assert_eq!(ran.code, 0, "{line}\n{}", ran.stderr);
    serde_json::from_str(&ran.stdout).expect("a record")
}

#[test]
fn dense_and_pruned_in_one_sweep_give_the_bits_of_two_runs_in_any_memory() {
    let place = place_with_task(QUESTIONS);
    let tasks = "--tasks my=q.jsonl --num-fewshot 1 --seqlen 64 --eval-dataset test.txt";
    let both = "--model m --prune-method magnitude --sparsity-ratio 0.5 --eval both --save out";
    results(&place, &format!("{both} {tasks} --log-samples both.jsonl"));
    let read = |name: &str| fs::read_to_string(place.path(name)).expect("samples");
    let both = read("both.jsonl");
    let (dense, pruned): (Vec<&str>, Vec<&str>) =
        both.lines().partition(|line| line.contains("\"model\":\"dense\""));
    assert_eq!((dense.len(), pruned.len()), (3, 3));
    let pruned: Vec<String> =
        pruned.iter().map(|line| line.replace("\"pruned\"", "\"dense\"")).collect();
    for (model, lines) in [("m", dense.join("\n")), ("out/model", pruned.join("\n"))] {
        for more in [
            "--threads 2",
            "--threads 1",
            "--hidden-states disk --offload-folder spill",
            r#"--memory-settings {"weights":"matrix","prefetch":false,"mlp_tokens":16,"attention_heads":1}"#,
            r#"--simulate {"gpus":["1GiB"]}"#,
        ] {
            let cpu = if more.contains("simulate") { "" } else { "--use-cpu" };
            let line = format!("eval {model} {tasks} --log-samples one.jsonl --json {more} {cpu}");
            let ran = place.run(&line);
            assert_eq!(ran.code, 0, "{line}\n{}", ran.stderr);
            assert_eq!(read("one.jsonl").trim_end(), lines, "{model} {more}");
        }
    }
    let against = format!("eval out/model --against m {tasks} --log-samples two.jsonl");
    let record = results(&place, &against);
    assert_eq!(read("two.jsonl"), both, "two commands");
    assert!(record.perplexity.divergence.is_some());
}

#[test]
fn tasks_have_a_table_and_a_gate() {
    let place = place_with_task(QUESTIONS);
    let tasks = "--tasks my=q.jsonl --seqlen 64 --use-cpu";
    let ran = place.run(&format!("eval m {tasks} --min-accuracy 1"));
    let right = ran.stdout.contains("100.00 ±");
    assert_eq!(ran.code, if right { 0 } else { 4 }, "{}\n{}", ran.stdout, ran.stderr);
    for row in ["tasks ", "  my ", "(acc, 3 questions)", "(acc_norm, 3 questions)"] {
        assert!(ran.stdout.contains(row), "{row}\n{}", ran.stdout);
    }
    let ran = place.run("eval m --eval-dataset test.txt --seqlen 64 --use-cpu --min-accuracy 0.5");
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("hint: name them, like --tasks "), "{}", ran.stderr);
    let ran = place.run("eval m --tasks boolq --use-cpu");
    assert_eq!(ran.code, 1, "without a network");
    let hint = "or name a folder with the files: --tasks-from DIR";
    assert!(ran.stderr.contains(hint), "{}", ran.stderr);
    let ran = place.run("eval m --tasks my=q.jsonl,my=test.txt --use-cpu");
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("--tasks names `my` twice"), "{}", ran.stderr);
}

#[test]
fn a_file_may_begin_with_the_mark_of_its_encoding_and_other_columns_are_explained() {
    let place = place_with_task(&format!("\u{feff}{QUESTIONS}"));
    let record = results(&place, "eval m --tasks my=q.jsonl --seqlen 64");
    assert!(record.tasks.is_some());
    let place = place_with_task(r#"{"question": "a"}"#);
    let ran = place.run("eval m --tasks my=q.jsonl --use-cpu");
    let hint = r#"hint: write an object per line, like {"context": "...", "choices": ["...", "..."], "label": 0}"#;
    assert!(ran.stderr.contains(hint), "{}", ran.stderr);
}

#[test]
fn a_bad_row_is_one_error_with_file_and_line() {
    let good = r#"{"context": "a", "choices": ["b", "c"], "label": 0}"#;
    let long = format!(r#"{{"context": "{}", "choices": ["b"], "label": 0}}"#, "x".repeat(2 << 20));
    for (bad, why) in [
        (r#"{"context": "a", "choices": ["b", "c"]}"#, "it has no `label`"),
        (
            r#"{"context": "a", "choices": ["b", "c"], "label": 2}"#,
            "`label` is 2, and the choices are 0 to 1",
        ),
        (r#"{"context": "a", "choices": [], "label": 0}"#, "`choices` is empty"),
        (r#"{"context": "a", "choices": ["b", ""], "label": 0}"#, "a choice is an empty text"),
        (r#"{"context": 1, "choices": ["b"], "label": 0}"#, "`context` is a number, not a text"),
        (
            r#"{"context": "a", "choices": ["b", 2], "label": 0}"#,
            "`choices` is a list, not a list of texts",
        ),
        (
            r#"{"context": "a", "choices": ["b"], "label": "0"}"#,
            "`label` is a text, not a whole number",
        ),
        ("[]", "it is a list, not an object"),
        ("{", "it is no JSON"),
        (&long, "it has 2.00 MiB, and 1.00 MiB is the limit"),
    ] {
        let place = place_with_task(&format!("{good}\n{bad}\n"));
        let ran = place.run("eval m --tasks my=q.jsonl --seqlen 64 --use-cpu");
        assert_eq!(ran.code, 1, "{}", ran.stderr);
        let first = ran.stderr.lines().next().expect("a message");
        assert!(first.contains("q.jsonl`, line 2: ") && first.contains(why), "{first}");
        assert_eq!(ran.stderr.matches("error:").count(), 1, "{}", ran.stderr);
        assert!(ran.stderr.contains("hint:"), "{}", ran.stderr);
    }
}

/// The texts and ids of ten times as many questions are on the disk: in memory are places, lengths and scores.
#[test]
fn memory_does_not_grow_with_the_number_of_questions() {
    let place = Place::with(&RandomCheckpoint {
        hidden_size: 512,
        intermediate_size: 1024,
        num_attention_heads: 8,
        num_key_value_heads: 8,
        vocab_size: 2000,
        ..RandomCheckpoint::default()
    });
    let context = "the cat sat on the mat and looked at the dog in the garden ".repeat(2);
    let row = format!(
        "{{\"context\": \"{context}\", \"choices\": [\"sat\", \"a mat\", \"ran\"], \"label\": 0}}\n"
    );
    let of = |questions: usize| -> Option<[f64; 2]> {
        fs::write(place.path("q.jsonl"), row.repeat(questions)).expect("a file");
        let line = "eval m --tasks my=q.jsonl --seqlen 256 --use-cpu --hidden-states disk --json";
        let ran = place.run(line);
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let record: Manifest = serde_json::from_str(&ran.stdout).expect("a record");
        let planned = record.plan.as_ref().and_then(Plan::cpu).expect("a plan").peak;
        Some([record.peak_anonymous?.0 as f64, planned.0 as f64])
    };
    let Some(few) = of(40) else { return eprintln!("skipped: the system tells no memory") };
    let many = of(400).expect("as before");
    for [measured, planned] in [few, many] {
        assert!((0.8..=1.05).contains(&(measured / planned)), "{measured} of {planned}");
    }
    assert!(many[0] < 1.2 * few[0] && many[1] < 1.05 * few[1], "{few:?} {many:?}");
}
