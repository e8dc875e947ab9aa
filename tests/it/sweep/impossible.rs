//! Cells that the model or the settings cannot have: they are recorded, and the others are pruned.

use serde_json::Value;

use super::table;
use crate::support::{Place, TEXTS};

#[test]
fn an_impossible_cell_is_recorded_and_the_others_are_pruned() {
    let place = Place::new();
    let line = format!("sweep --model m --methods wanda --types 2:4,3:7 --save out {TEXTS}");
    let ran = place.run(&line);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("error: 1 of 2 cells failed\n  wanda-3of7-seed0\n"),
        "{}",
        ran.stderr
    );
    let json = table(&place);
    let cells = json["cells"].as_array().expect("a list");
    let states: Vec<_> = cells.iter().map(|cell| (&cell["name"], &cell["state"])).collect();
    assert_eq!(states[0], (&Value::from("wanda-2of4-seed0"), &Value::from("finished")));
    assert_eq!(states[1], (&Value::from("wanda-3of7-seed0"), &Value::from("failed")));
    let error = cells[1]["error"].as_str().expect("recorded");
    assert!(error.contains("3:7"), "{error}");
    // A step that one of the methods cannot have.
    let line = format!(
        "sweep --model m --methods wanda,sparsegpt --ratios 0.5 --refine dsnot --save steps {TEXTS}"
    );
    let ran = place.run(&line);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("error: 1 of 2 cells failed\n  sparsegpt-0.5-seed0\n")
            && ran.stderr.contains("--refine dsnot is not defined after --prune-method sparsegpt"),
        "{}",
        ran.stderr
    );
    // A sweep without a possible cell is refused before anything is written.
    let line = format!("sweep --model m --methods wanda --types 3:7 --save none {TEXTS}");
    let ran = place.run(&line);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(!place.path("none").exists());
}
