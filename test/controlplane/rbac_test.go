package controlplane

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	config "github.com/dra-shared/dra-driver-shared/api/config/v1alpha1"
	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/api/v1alpha1"
)

// askedByOthers are rights that the API server looks at when something else is
// asked of it; the chart says what.
var askedByOthers = []string{
	"patch resourceclaims/binding.resource.k8s.io",
	"arbitrary-node:patch resourceclaims/driver.resource.k8s.io",
	"update podgroups/finalizers.scheduling.dra-shared.dev",
}

// What is done in one mode only: to create a PodGroup of Kubernetes', in a dry run,
// is how clusters without them are known; to take gates away.
const (
	nativeOnly = " podgroups.scheduling.k8s.io"
	bridgeOnly = "patch pods"
)

// The controller may do what it does, and nothing else: every other test runs with
// the rights that the chart gives; here each of them is used.
func TestEveryRightIsUsed(t *testing.T) {
	e := requireTestEnv(t)
	if !e.asked.has("delete resourceclaims.resource.k8s.io") { // by the tests before this one
		e.life(t, &death{})
	}
	if !e.asked.has("watch jobs.batch") {
		t.Run("a claim that an object holds", func(t *testing.T) {
			e.controller(t, nil)
			e.podsThatHaveEndedCostAHeldClaimNothing(t)
		})
	}
	t.Run("what the caches do not have, and what is told twice", func(t *testing.T) {
		e.controller(t, nil)
		e.mistakes(t)
	})
	t.Run("fabrics change, and go", func(t *testing.T) {
		more := driverConfig()
		more.Fabrics[0].Groups++
		for _, c := range []*config.DriverConfig{more, {}} {
			stop := e.controllerOf(t, c, nil)
			e.eventually(t.Context(), t, "fabrics are published as configured", func() error { return e.publishes(t.Context(), c.Fabrics) })
			stop()
		}
	})
	given, err := e.rights(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	for _, right := range slices.Sorted(maps.Keys(given)) {
		switch {
		case e.asked.has(strings.Replace(right, "list ", "watch ", 1)): // for API servers that do not stream what there is
		case e.asked.has(right), slices.Contains(askedByOthers, right), !e.native && strings.HasSuffix(right, nativeOnly), e.native && right == bridgeOnly:
		default:
			t.Errorf("the chart lets the controller %s, and it never did", right)
		}
	}
}

// mistakes are pods of a template, of a class and of a claim that do not exist,
// and a claim held by what the controller may not see, of which it tells again when
// the claim changes.
func (e *testEnv) mistakes(t *testing.T) {
	t.Helper()
	ctx := context.Background()
	ns := e.namespace(t, "mistakes")
	spec := fabricSpec()
	spec.Devices.Requests[0].Exactly.DeviceClassName = "nobody-has-made-it"
	claim := fabricClaim(ns, "team")
	claim.Annotations = map[string]string{scheduling.ReservedForAnnotation: "apps/deployments/web"}
	template := &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "classless"}, Spec: resourceapi.ResourceClaimTemplateSpec{Spec: spec}}
	for _, o := range []client.Object{template, claim} {
		if err := e.client.Create(ctx, o); err != nil {
			t.Fatal(err)
		}
	}
	missing := "nobody-has-made-it"
	for i, c := range []corev1.PodResourceClaim{{ResourceClaimTemplateName: &missing}, {ResourceClaimTemplateName: &template.Name}, {ResourceClaimName: &missing}} {
		pod := e.pod(ns, "alone", i)
		pod.Annotations = nil
		c.Name = "fabric"
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{c}
		if err := e.client.Create(ctx, pod); err != nil {
			t.Fatal(err)
		}
	}
	tries := 0
	e.eventually(ctx, t, "it is told twice that the controller may not see who holds the claim", func() error {
		tries++
		raw := fmt.Appendf(nil, `{"metadata":{"labels":{"try":"%d"}}}`, tries)
		if err := e.client.Patch(ctx, claim.DeepCopy(), client.RawPatch(types.MergePatchType, raw)); err != nil {
			return err
		}
		told, err := e.cluster.EventsV1().Events(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range told.Items {
			if e.Reason == v1alpha1.ReasonHolderForbidden && e.Series != nil {
				return nil
			}
		}
		return fmt.Errorf("%d events", len(told.Items))
	})
}

// publishes checks that there is a slice for each fabric, with its groups.
func (e *testEnv) publishes(ctx context.Context, fabrics []config.Fabric) error {
	published, err := e.cluster.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	if len(published.Items) != len(fabrics) {
		return fmt.Errorf("%d slices for %d fabrics", len(published.Items), len(fabrics))
	}
	for i, fabric := range fabrics {
		for name, c := range published.Items[i].Spec.Devices[0].Capacity {
			if c.Value.Value() != int64(fabric.Groups) {
				return fmt.Errorf("capacity %s is %s, not %d", name, &c.Value, fabric.Groups)
			}
		}
	}
	return nil
}

// rights are what the chart gives the controller.
func (e *testEnv) rights(ctx context.Context) (map[string]bool, error) {
	const name = "dra-shared-controller"
	everywhere, err := e.cluster.RbacV1().ClusterRoles().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	here, err := e.cluster.RbacV1().Roles(system).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	all := map[string]bool{}
	for _, rule := range slices.Concat(everywhere.Rules, here.Rules) {
		eachRight(rule, func(right string) { all[right] = true })
	}
	return all, nil
}

func eachRight(rule rbacv1.PolicyRule, do func(string)) {
	for _, group := range rule.APIGroups {
		for _, resource := range rule.Resources {
			for _, verb := range rule.Verbs {
				do(right(verb, resource, group))
			}
		}
	}
}

func right(verb, resource, group string) string {
	return strings.TrimRight(verb+" "+resource+"."+group, ".")
}

// asked remembers which rights requests made use of.
type asked struct {
	mu     sync.Mutex
	rights map[string]bool
}

func (a *asked) has(right string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.rights[right]
}

// wrap makes requests be remembered that were not forbidden.
func (a *asked) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		response, err := next.RoundTrip(r)
		if err == nil && response.StatusCode != http.StatusForbidden {
			a.mu.Lock()
			defer a.mu.Unlock()
			if a.rights == nil {
				a.rights = map[string]bool{}
			}
			a.rights[rightOf(r)] = true
		}
		return response, err
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// rightOf reads /api/v1/... or /apis/group/version/..., and there
// [namespaces/name/]resource[/name[/subresource]].
func rightOf(r *http.Request) string {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	group := ""
	switch {
	case parts[0] == "api" && len(parts) > 2:
		parts = parts[2:]
	case parts[0] == "apis" && len(parts) > 3:
		group, parts = parts[1], parts[3:]
	default:
		return r.URL.Path // discovery
	}
	if parts[0] == "namespaces" && len(parts) > 2 {
		parts = parts[2:]
	}
	resource, named := parts[0], len(parts) > 1
	if len(parts) > 2 {
		resource += "/" + parts[2]
	}
	verb := map[string]string{http.MethodPost: "create", http.MethodPut: "update", http.MethodPatch: "patch", http.MethodDelete: "delete"}[r.Method]
	switch {
	case verb != "":
	case named:
		verb = "get"
	case r.URL.Query().Get("watch") != "":
		verb = "watch"
	default:
		verb = "list"
	}
	return right(verb, resource, group)
}
