//! Conversations as texts: every command reads the forms that data sets have, renders them with the model's template, and states their form.

use std::fs;

use serde_json::{Value, json};

use crate::support::{Place, edit_sealed, words};

/// A model with a chat template of plain words.
fn place() -> Place {
    let place = Place::new();
    let template = "{% for m in messages %}{{ m['role'] + ' ' + (m['content'] or '') + ' end ' }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}";
    fs::write(place.path("m/chat_template.jinja"), template).expect("the model is there");
    place
}

/// Turns of a conversation.
fn turns(seed: u64) -> [(&'static str, String); 2] {
    [("user", words(seed, 30)), ("assistant", words(seed + 100, 30))]
}

/// Makes the row of a number.
type RowOf = fn(u64) -> Value;

/// Rows of every form, with its name.
fn forms() -> Vec<(&'static str, RowOf)> {
    vec![
        ("messages", |seed| {
            let turns = turns(seed).map(|(role, content)| json!({"role": role, "content": [{"type": "text", "text": content}]}));
            json!({"text": null, "messages": turns, "tools": [{"name": "look"}], "score": 1.5})
        }),
        ("conversations", |seed| {
            let [(_, user), (_, answer)] = turns(seed);
            json!({"conversations": [{"from": "human", "value": user}, {"from": "gpt", "value": answer}]})
        }),
        ("instruction, input and output", |seed| {
            let [(_, user), (_, answer)] = turns(seed);
            json!({"instruction": user, "input": "", "output": answer, "text": "all of it"})
        }),
        ("prompt and completion", |seed| {
            let [(_, user), (_, answer)] = turns(seed);
            json!({"prompt": [{"role": "user", "content": user}], "completion": [{"role": "assistant", "content": answer}]})
        }),
    ]
}

#[test]
fn every_command_reads_every_form_and_states_it() {
    let place = place();
    place.prune("--model m --sparsity-ratio 0.5 --prune-method magnitude --eval none --save p");
    for (name, row) in forms() {
        let rows: Vec<Value> =
            (0..8).map(row).chain([json!({"messages": null, "text": null})]).collect();
        let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
        fs::write(place.path("d.jsonl"), lines).unwrap();
        fs::write(place.path("d.json"), serde_json::to_string_pretty(&rows).unwrap()).unwrap();
        for file in ["d.jsonl", "d.json"] {
            let stated = format!("documents    {name}, 8 of 9 examples of `{file}`");
            for line in [
                format!("eval m --eval-dataset {file} --seqlen 32 --eval-windows 2"),
                format!(
                    "--model m --sparsity-ratio 0.5 --dataset {file} --nsamples 2 --seqlen 64 --eval none"
                ),
                format!(
                    "recover --how lora --rank 2 --steps 1 --batch-size 2 --seqlen 64 --held-out 0 --eval none --model p/model --dataset {file} --save r --force"
                ),
            ] {
                let ran = place.run(&line);
                assert_eq!(ran.code, 0, "{line}: {}", ran.stderr);
                assert!(ran.stderr.contains(&stated), "{line}: {}", ran.stderr);
            }
        }
    }
}

#[test]
fn unknown_forms_and_roles_are_refused_with_what_was_found_and_what_is_needed() {
    let place = place();
    let eval = "eval m --eval-dataset d.jsonl --seqlen 32";
    fs::write(place.path("d.jsonl"), "{\"question\": \"Why?\", \"answer\": \"So.\"}\n").unwrap();
    let ran = place.run(eval);
    assert!(
        ran.code == 1 && ran.stderr.contains("fields found: question, answer"),
        "{}",
        ran.stderr
    );
    assert!(
        ran.stderr.contains("rename the fields to one of: `text`; `messages`"),
        "{}",
        ran.stderr
    );
    // No answer: training names the roles.
    let row = json!({"messages": [{"role": "narrator", "content": words(1, 40)}, {"role": "actor", "content": words(2, 40)}]});
    fs::write(place.path("d.jsonl"), format!("{row}\n").repeat(9)).unwrap();
    let train = "recover --how lora --rank 2 --steps 1 --batch-size 2 --seqlen 32 --held-out 0 --eval none --model m --dataset d.jsonl --save r";
    let ran = place.run(train);
    assert!(
        ran.code == 1 && ran.stderr.contains("have the roles actor, narrator"),
        "{}",
        ran.stderr
    );
    // A conversation without a template names the line and the remedy.
    fs::remove_file(place.path("m/chat_template.jinja")).unwrap();
    let ran = place.run(eval);
    assert!(
        ran.code == 1
            && ran.stderr.contains("line 1 of `d.jsonl`: a conversation needs a chat template"),
        "{}",
        ran.stderr
    );
}

/// A line of a known form with a wrong value: the hint is the change of this value, not another name of a field.
#[test]
fn a_wrong_value_is_refused_with_the_change_that_it_needs() {
    let place = place();
    let answer = json!({"role": "assistant", "content": words(1, 40)});
    let called = json!({"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]});
    fs::write(
        place.path("m/chat_template.jinja"),
        "{% for m in messages %}{{ m['content'] + ' end ' }}{% endfor %}",
    )
    .unwrap();
    let cases = [
        (json!({"text": 5}), "`text` is a number, not a string", r#"write "text": "…""#),
        (
            json!({"messages": {"role": "user"}}),
            "`messages` is an object, not a list",
            r#"write messages like [{"role""#,
        ),
        (
            json!({"messages": [{"content": "a"}, answer]}),
            "message 1 has no `role`",
            "write messages like",
        ),
        (
            json!({"messages": [{"role": "user", "content": null}, answer]}),
            "message 1 has no `content`",
            r#"write "content": """#,
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, answer]}),
            "content part of type `image_url`",
            "leave the part or the line out",
        ),
        (
            json!({"messages": [answer], "tools": "look"}),
            "`tools` is a string",
            "write `tools` as a list",
        ),
        (
            json!({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}),
            "`prompt` is a list, not a string",
            "`prompt` and `completion` both as strings, or both as lists of messages",
        ),
        (
            json!({"data": [{"text": "a"}]}),
            "`data` is a list of objects",
            "if `data` holds the documents, write its list alone; else rename the fields",
        ),
        (
            json!({"messages": [{"role": "user", "content": "a"}, called]}),
            "cannot be used",
            r#"write "content": "" in message 2"#,
        ),
    ];
    for (row, why, hint) in cases {
        fs::write(place.path("d.jsonl"), format!("{row}\n").repeat(9)).unwrap();
        let ran = place.run("eval m --eval-dataset d.jsonl --seqlen 32");
        assert!(ran.code == 1 && ran.stderr.contains(why), "{row}: {}", ran.stderr);
        assert!(ran.stderr.contains("line 1 of `d.jsonl`"), "{row}: {}", ran.stderr);
        let told = ran.stderr.lines().find(|line| line.starts_with("hint: "));
        assert!(told.is_some_and(|told| told.contains(hint)), "{row}: {}", ran.stderr);
    }
    // An object over several lines, and lists without an entry.
    for (text, why, hint) in [
        ("{\n \"text\": \"a\"\n}\n", "it is not JSON", "hint: write each object in one line"),
        ("[]", "no documents in `d.json`", "hint: name a file that has documents"),
        ("[{\"messages\": []}]", "null or empty lists", "hint: name a file that has documents"),
    ] {
        fs::write(place.path("d.json"), text).unwrap();
        let ran = place.run("eval m --eval-dataset d.json --seqlen 32");
        assert!(ran.code == 1 && ran.stderr.contains(why), "{text}: {}", ran.stderr);
        assert!(ran.stderr.contains(hint), "{text}: {}", ran.stderr);
    }
}

#[test]
fn the_folder_of_a_data_set_is_read_by_its_splits() {
    let place = Place::new();
    fs::create_dir_all(place.path("set/data")).unwrap();
    let lines = |seed: u64| -> String {
        (0..5).map(|number| format!("{}\n", json!({"text": words(seed + number, 200)}))).collect()
    };
    for (name, seed) in
        [("train-00000-of-00002", 1), ("train-00001-of-00002", 9), ("validation", 20)]
    {
        fs::write(place.path(&format!("set/data/{name}.jsonl")), lines(seed)).unwrap();
    }
    fs::write(place.path("set/dataset_info.json"), "{}").unwrap();
    let ran = place.run("--model m --sparsity-ratio 0.5 --dataset set --eval-dataset set --nsamples 2 --seqlen 64 --eval-windows 2");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stderr.contains("text, 10 of 10 examples of `data`"), "{}", ran.stderr);
    assert!(ran.stderr.contains("text, 5 of 5 examples of `validation.jsonl`"), "{}", ran.stderr);
}

#[test]
fn a_run_that_continues_on_a_later_day_has_the_date_of_its_first_process() {
    /// 2024-07-26.
    const DAY: u64 = 1_721_952_000;
    let place = place();
    let template = "{{ strftime_now('%d %b %Y') }} {% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' end ' }}{% endfor %}";
    fs::write(place.path("m/chat_template.jinja"), template).expect("the model is there");
    let rows: Vec<String> = (0..8)
        .map(|seed| {
            let [(_, user), (_, answer)] = turns(seed);
            json!({"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]}).to_string()
        })
        .collect();
    fs::write(place.path("d.jsonl"), rows.join("\n")).expect("a new file");
    let line = |save: &str| {
        format!(
            "--model m --sparsity-ratio 0.5 --dataset d.jsonl --nsamples 2 --seqlen 32 --eval none --save {save}"
        )
    };
    let on_that_day = |save: &str, fault: Option<&str>| {
        let mut command = place.command(&line(save));
        command.env("SOURCE_DATE_EPOCH", DAY.to_string());
        command.envs(fault.map(|fault| ("PRUNE_FAULT", fault)));
        command.output().expect("the binary was built by this test run").status.code()
    };
    assert_eq!(on_that_day("whole", None), Some(0));
    let hash = |save: &str| place.manifest(save).calibration.expect("samples").tokens_sha256;
    let run = |save: &str| {
        let ran = place.run(&line(save));
        assert_eq!(ran.code, 0, "{}", ran.stderr);
    };
    run("today");
    assert_ne!(hash("today"), hash("whole"), "the date is in the text");
    // The last kill that leaves a state to continue from.
    let is_left = |number: &u32| {
        let _ = fs::remove_dir_all(place.path("out"));
        on_that_day("out", Some(&format!("kill:{number}"))).is_none()
            && place.path("out/unfinished.json").is_file()
    };
    let left = (5..200).step_by(5).find(is_left);
    assert!(left.is_some(), "a kill leaves a state");
    edit_sealed(&place.path("out/unfinished.json"), |state| {
        let mut state: Value = serde_json::from_str(&state).expect("JSON");
        state["started_unix_seconds"] = DAY.into();
        serde_json::to_string_pretty(&state).expect("JSON")
    });
    run("out");
    assert_eq!(hash("out"), hash("whole"));
}
