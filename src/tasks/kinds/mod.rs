//! The tasks, a file each: texts, choices and metrics as in lm-evaluation-harness 0.4.13.
//!
//! | file | task |
//! | --- | --- |
//! | `arc` | ARC, easy and challenge: science questions |
//! | `boolq` | BoolQ: yes or no, from a passage |
//! | `hellaswag` | HellaSwag: the end of a story |
//! | `mmlu` | MMLU: 57 subjects, answers by letter |
//! | `openbookqa` | OpenBookQA: elementary science |
//! | `own` | a user's own multiple-choice task |
//! | `piqa` | PIQA: everyday physics |
//! | `rte` | RTE: does a sentence follow |
//! | `winogrande` | WinoGrande: the noun of a pronoun |

pub(super) mod arc;
pub(super) mod boolq;
pub(super) mod hellaswag;
pub(super) mod mmlu;
pub(super) mod openbookqa;
pub(super) mod own;
pub(super) mod piqa;
pub(super) mod rte;
pub(super) mod winogrande;
