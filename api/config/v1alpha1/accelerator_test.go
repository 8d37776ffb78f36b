// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"strings"
	"testing"
)

func TestLoad_validAcceleratorsAndFabrics(t *testing.T) {
	c, err := Load([]byte(header + `
accelerators:
- name: h200
  match: {pciClass: "0302", vendor: 10de, device: "2335"}
  capacity: {memory: 141Gi, compute: "100"}
  policy:
    memory: {default: 10Gi, min: 1Gi, max: 80Gi, step: 1Gi}
    compute: {default: "0", values: ["0", "10", "25", "50", "100"]}
  edits:
    environment: {CUDA_MPS_ACTIVE_THREAD_PERCENTAGE: "${compute.percent}", PRICE: "$$5"}
    deviceNodes: [/dev/nvidiactl]
    mounts: [{hostPath: "/run/mps/${pciBusID}", containerPath: /tmp/mps, writable: true}]
  allow: {deviceNodes: ["/dev/nvidia-caps/*"]}
- {name: npu, match: {devicePaths: ["/dev/npu[0-9]*"]}, exclusive: true, capacity: {memory: 8Gi}}
- {name: free, match: {devicePaths: [/dev/free]}}
- name: part
  match: {devicePaths: [/dev/part]}
  capacity: {compute: "1"}
  policy: {compute: {default: 250m, min: 0, step: 50m}}
fabrics:
- name: rack1
  nodeSelector: {example.com/rack: "1"}
  attributes: {topology: 4x4}
  edits: {environment: {NODE: "${node}"}}`))
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Accelerators) != 4 || len(c.Fabrics) != 1 {
		t.Errorf("%+v", c)
	}
}

func TestLoad_invalidAccelerator(t *testing.T) {
	const match = `name: a, match: {devicePaths: [/dev/x]}`
	for _, tc := range []struct{ name, fields, want string }{
		{"no criteria", `name: a, match: {}`,
			`accelerators[0].match: Required value: give pciClass, vendor and device, or devicePaths`},
		{"vendor that is not hexadecimal", `name: a, match: {vendor: nvidia}`,
			`accelerators[0].match.vendor: Invalid value: "nvidia": must be four hexadecimal digits, such as 10de`},
		{"incomplete PCI class", `name: a, match: {pciClass: "030"}`,
			`accelerators[0].match.pciClass: Invalid value: "030"`},
		{"device path outside /dev", `name: a, match: {devicePaths: [/etc/passwd]}`,
			`accelerators[0].match.devicePaths[0]: Invalid value: "/etc/passwd": must be a path below /dev or a pattern`},
		{"unknown field", match + `, memory: 1Gi`, `unknown field "accelerators[0].memory"`},
		{"capacity of zero", match + `, capacity: {memory: 0}`,
			`accelerators[0].capacity[memory]: Invalid value: "0": must be more than zero`},
		{"policy without a capacity", match + `, policy: {memory: {default: 1, min: 0}}`,
			`accelerators[0].policy[memory]: Invalid value: "memory": is not a capacity: add it to capacity`},
		{"policy of an exclusive device",
			match + `, exclusive: true, capacity: {memory: 1Gi}, policy: {memory: {default: 1, min: 0}}`,
			`accelerators[0].policy[memory]: Forbidden: claims cannot request parts of an exclusive device`},
		{"policy without a default", match + `, capacity: {memory: 1Gi}, policy: {memory: {min: 0}}`,
			`accelerators[0].policy[memory].default: Required value`},
		{"neither values nor min", match + `, capacity: {memory: 1Gi}, policy: {memory: {default: 0}}`,
			`accelerators[0].policy[memory].min: Required value: give min, optionally with max and step, or values`},
		{"both values and a range", match + `, capacity: {memory: 1Gi}, policy: {memory: {default: 0, min: 0, values: [0]}}`,
			`values: Forbidden: give either values or min, max, and step`},
		{"maximum above the capacity", match + `, capacity: {memory: 1Gi}, policy: {memory: {default: 0, min: 0, max: 2Gi}}`,
			`accelerators[0].policy[memory].max: Invalid value: "2Gi": must be between 0 and the capacity, 1Gi`},
		{"values in the wrong order", match + `, capacity: {c: 10}, policy: {c: {default: 1, values: [2, 1]}}`,
			`accelerators[0].policy[c].values[1]: Invalid value: "1": must be more than the value before it`},
		{"default that is not one of the values", match + `, capacity: {c: 10}, policy: {c: {default: 3, values: [1, 2]}}`,
			`accelerators[0].policy[c].default: Invalid value: "3": must be one of values`},
		{"default between steps", match + `, capacity: {c: 10}, policy: {c: {default: 3, min: 0, step: 2}}`,
			`policy[c].default: Invalid value: "3": must be min, 0, plus a multiple of step, 2`},
		{"fractional maximum between steps",
			match + `, capacity: {c: 1}, policy: {c: {default: 0, min: 0, max: 750m, step: 500m}}`,
			`policy[c].max: Invalid value: "750m": must be min, 0, plus a multiple of step, 500m`},
		{"step beyond the capacity", match + `, capacity: {c: 10}, policy: {c: {default: 8, min: 8, step: 4}}`,
			`policy[c].step: Invalid value: "4": must be more than zero, and min plus step at most the capacity, 10`},
		{"step of zero", match + `, capacity: {c: 10}, policy: {c: {default: 8, min: 8, step: 0}}`,
			`policy[c].step: Invalid value: "0"`},
		{"unknown variable", match + `, edits: {environment: {A: "${memroy}"}}, capacity: {memory: 1}`,
			`accelerators[0].edits.environment[A]: Invalid value: "${memroy}": has the unknown variable "memroy"; ` +
				`known variables are device, memory, memory.Gi`},
		{"variable without braces", match + `, edits: {environment: {A: $memory}}`,
			`must have variables as ${name}, and $$ for a dollar sign`},
		{"environment variable with the prefix of the driver", match + `, edits: {environment: {DRA_SHARED_A: ""}}`,
			`names that begin with DRA_SHARED_ are reserved for the driver`},
		{"PCI variable for devices that match by path", match + `, edits: {environment: {A: "${pciBusID}"}}`,
			`has the unknown variable "pciBusID"`},
		{"two capacities with the same environment variable", match + `, capacity: {memory: 1Gi, memory_bytes: 1}`,
			`accelerators[0].capacity[memory_bytes]: Invalid value: "memory_bytes": ` +
				`maps to the same environment variable as memory (MEMORY_BYTES)`},
		{"capacity with the name of a variable", match + `, capacity: {share: 1}`,
			`accelerators[0].capacity[share]: Invalid value: "share": is reserved: every share has a variable with this name`},
		{"memory that is not a whole number of bytes", match + `, capacity: {memory: 1500m}`,
			`accelerators[0].capacity[memory]: Invalid value: "1500m": must be a whole number of bytes`},
		{"mount over /dev", match + `, edits: {mounts: [{hostPath: /run/x, containerPath: /dev}]}`,
			`edits.mounts[0].containerPath: Forbidden: the container runtime mounts /dev`},
		{"two mounts at one path",
			match + `, edits: {mounts: [{hostPath: /run/x, containerPath: /x}, {hostPath: /run/y, containerPath: /x}]}`,
			`edits.mounts[1].containerPath: Duplicate value: "/x"`},
		{"duplicate device node", match + `, edits: {deviceNodes: [/dev/x, /dev/x]}`,
			`edits.deviceNodes[1]: Duplicate value: "/dev/x"`},
		{"mount of the root directory", match + `, edits: {mounts: [{hostPath: /, containerPath: /x}]}`,
			`accelerators[0].edits.mounts[0].hostPath: Invalid value: "/": must be an absolute path without ..`},
		{"mount with a relative path", match + `, edits: {mounts: [{hostPath: "/run/../${device}", containerPath: /x}]}`,
			`hostPath: Invalid value`},
		{"device node outside /dev", match + `, edits: {deviceNodes: [/etc/x]}`,
			`edits.deviceNodes[0]: Invalid value: "/etc/x": must be the path of a device node below /dev`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Load([]byte(header + "accelerators: [{" + tc.fields + "}]"))
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got  %v\nwant %s", err, tc.want)
			}
		})
	}
}
