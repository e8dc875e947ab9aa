//! MMLU (Hendrycks et al. 2020, arXiv:2009.03300): 57 subjects. A question names its choices by letter, and the letters are scored.

use crate::failure::Failure;
use crate::tasks::kind::{ExampleDraws, Question, TaskKind};
use crate::tasks::python_text::strip;
use crate::tasks::row::TaskRow;

/// The task of a subject. Examples are the first rows of `dev`.
pub(in crate::tasks) const MMLU: TaskKind = TaskKind {
    name: "mmlu",
    repository: "cais/mmlu",
    config: None,
    evaluated: "test",
    examples: "dev",
    draws: ExampleDraws::First,
    has_acc_norm: false,
    question,
};

/// The letters of the choices.
const LETTERS: [&str; 4] = ["A", "B", "C", "D"];

fn question(row: &TaskRow) -> Result<Question, Failure> {
    let asked = strip(row.text("question")?);
    let choices = row.texts("choices")?;
    let [a, b, c, d] = choices[..] else {
        let count = row.failure(format!("it has {} choices, not 4", choices.len()));
        return Err(count.hint("give the question four choices, or leave the row out"));
    };
    let context = format!("{asked}\nA. {a}\nB. {b}\nC. {c}\nD. {d}\nAnswer:");
    Ok(Question::of_choices(context, &LETTERS, row.index("answer", 0, LETTERS.len())?))
}

/// The text before the questions of a subject, in every context.
pub(in crate::tasks) fn description(subject: &str) -> String {
    let subject = subject.replace('_', " ");
    format!("The following are multiple choice questions (with answers) about {subject}.\n\n")
}

/// The group of a subject; `None` for a name that is no subject.
pub(in crate::tasks) fn group(subject: &str) -> Option<&'static str> {
    let of_group = |(_, subjects): &&(&str, &[&str])| subjects.contains(&subject);
    GROUPS.iter().find(of_group).map(|(group, _)| *group)
}

/// All subjects with their groups, in the order of their names.
pub(in crate::tasks) fn subjects() -> Vec<(String, &'static str)> {
    let of_group = |(group, subjects): &(&'static str, &[&str])| {
        let group = *group;
        subjects.iter().map(move |subject| (subject.to_string(), group)).collect::<Vec<_>>()
    };
    let mut all: Vec<(String, &'static str)> = GROUPS.iter().flat_map(of_group).collect();
    all.sort();
    all
}

/// The groups and their subjects, from lm-evaluation-harness.
const GROUPS: [(&str, &[&str]); 4] = [
    (
        "humanities",
        &[
            "formal_logic",
            "high_school_european_history",
            "high_school_us_history",
            "high_school_world_history",
            "international_law",
            "jurisprudence",
            "logical_fallacies",
            "moral_disputes",
            "moral_scenarios",
            "philosophy",
            "prehistory",
            "professional_law",
            "world_religions",
        ],
    ),
    (
        "social_sciences",
        &[
            "econometrics",
            "high_school_geography",
            "high_school_government_and_politics",
            "high_school_macroeconomics",
            "high_school_microeconomics",
            "high_school_psychology",
            "human_sexuality",
            "professional_psychology",
            "public_relations",
            "security_studies",
            "sociology",
            "us_foreign_policy",
        ],
    ),
    (
        "stem",
        &[
            "abstract_algebra",
            "anatomy",
            "astronomy",
            "college_biology",
            "college_chemistry",
            "college_computer_science",
            "college_mathematics",
            "college_physics",
            "computer_security",
            "conceptual_physics",
            "electrical_engineering",
            "elementary_mathematics",
            "high_school_biology",
            "high_school_chemistry",
            "high_school_computer_science",
            "high_school_mathematics",
            "high_school_physics",
            "high_school_statistics",
            "machine_learning",
        ],
    ),
    (
        "other",
        &[
            "business_ethics",
            "clinical_knowledge",
            "college_medicine",
            "global_facts",
            "human_aging",
            "management",
            "marketing",
            "medical_genetics",
            "miscellaneous",
            "nutrition",
            "professional_accounting",
            "professional_medicine",
            "virology",
        ],
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_57_subjects() {
        assert_eq!(GROUPS.iter().map(|(_, subjects)| subjects.len()).sum::<usize>(), 57);
        assert_eq!((group("anatomy"), group("sleep")), (Some("stem"), None));
    }
}
