//! Chat templates made to do harm: filters and operators that allocate or loop in native code. Each ends as one error within two seconds.

use std::fs;
use std::time::{Duration, Instant};

use crate::support::Place;

/// The longest time of a refusal, with the start of two processes on a busy machine. The deadline of a rendering is 1 s.
const LONGEST: Duration = Duration::from_secs(8);

#[test]
fn every_hostile_template_is_one_error_in_time() {
    let place = Place::new();
    let doubled = |steps: usize, end: &str| {
        format!(
            "{{% set ns = namespace(s='0123456789abcdef') %}}{{% for i in range({steps}) %}}{{% set ns.s = ns.s ~ ns.s %}}{{% endfor %}}{end}"
        )
    };
    let templates = [
        "{{ ([1]*10**12)|last }}".to_owned(),
        "{{ ([1]*10**12)|join }}".to_owned(),
        "{{ ([1]*10**12)|list }}".to_owned(),
        "{{ ([1]*10**11)|sort|first }}".to_owned(),
        "{{ ([1]*10**12)|sum }}".to_owned(),
        "{{ ([1]*10**12)|length }}{{ 2 in ([1]*10**12) }}".to_owned(),
        "{{ ([1]*10**12) == ([1]*10**12) }}".to_owned(),
        "{{ ('x'*10**12)|length }}".to_owned(),
        "{{ ('x'*10**5*10**5)|length }}".to_owned(),
        "{{ range(10**12)|list|length }}".to_owned(),
        "{{ '%1000000000000d'|format(1) }}".to_owned(),
        "{{ ('a\n'*100000)|indent(10**9) }}".to_owned(),
        "{{ 'x'.center(10**12) }}{{ 'x'.ljust(10**12) }}".to_owned(),
        "{{ {'a': 1}|tojson(indent=10**12) }}".to_owned(),
        "{{ ('a'*100000)|replace('a', 'b'*100000) }}".to_owned(),
        "{{ ([1]*10**12)|batch(3)|first }}{{ ([1]*10**12)|slice(3)|last }}".to_owned(),
        "{% for i in [1]*10**12 %}{% endfor %}".to_owned(),
        "{% macro m(x) %}{{ m(x ~ x) }}{% endmacro %}{{ m('0123456789') }}".to_owned(),
        doubled(60, "{{ ns.s }}"),
        // Within memory and fuel, but each step compares megabytes.
        doubled(
            22,
            "{% set a = ns.s ~ 'a' %}{% set b = ns.s ~ 'b' %}{% for i in range(90000) %}{% if a == b %}x{% endif %}{% endfor %}",
        ),
        doubled(22, "{% for i in range(90000) %}{{ ns.s|length }}{% endfor %}"),
        doubled(20, "{{ ns.s * 4 }}"),
    ];
    for template in templates {
        fs::write(place.path("m/chat_template.jinja"), &template).unwrap();
        let began = Instant::now();
        let ran = place.run("generate m --chat --prompt hi --max-tokens 1");
        let took = began.elapsed();
        let shown: String = template.chars().take(80).collect();
        assert_eq!(ran.code, 1, "{shown}: {}", ran.stderr);
        assert_eq!(ran.stderr.matches("error: ").count(), 1, "{shown}: {}", ran.stderr);
        let start = "error: the chat template of `m/chat_template.jinja` cannot be used: ";
        let error = ran.stderr.find("error: ").map_or("", |at| &ran.stderr[at..]);
        assert!(error.starts_with(start), "{shown}: {}", ran.stderr);
        assert!(!ran.stderr.contains("memory allocation"), "{}", ran.stderr);
        assert!(took < LONGEST, "{shown}: {took:?}");
    }
}

/// The process that renders ends with the run, and a refused template leaves none behind.
#[cfg(target_os = "linux")]
#[test]
fn the_memory_of_a_template_is_bounded_in_a_process_of_its_own() {
    use std::io::Write;
    use std::process::Stdio;

    let place = Place::new();
    let mut command = place.command("render-chat-templates");
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut renderer = command.spawn().unwrap();
    // Two lists that grow for ever, step by step, below the fuel: only memory ends it.
    let template = "{% set ns = namespace(s='0123456789abcdef') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}";
    let request = serde_json::json!({"template": template, "variables": [], "messages": [], "beginnings": [{"messages": 0, "is_answered": true, "probed": null}]});
    let mut requests = renderer.stdin.take().unwrap();
    writeln!(requests, "{request}").unwrap();
    let mut peak = 0;
    let status = loop {
        if let Some(status) = renderer.try_wait().unwrap() {
            break status;
        }
        let text =
            fs::read_to_string(format!("/proc/{}/status", renderer.id())).unwrap_or_default();
        let kib =
            text.lines().find_map(|line| line.strip_prefix("VmHWM:")?.split_whitespace().next());
        peak = peak.max(kib.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0));
    };
    assert!(!status.success(), "{status}");
    assert!(peak < 400 << 10, "{peak} KiB");
}
